// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Output by a thread of its own: the file may be a pipe whose reader has stopped to read, and the VM must not stop with it.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::mem;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use devices::{file_size, sandbox};
use rustix::fs::fstat;

use crate::thread_roles::WRITER;

/// Up to how many bytes what waits is put together to be written by one call. So few that a slow line (9600 bits a second) takes
/// them in a third of a second: each call that returns shows that somebody reads.
const PIECE: usize = 256;
/// The same for a file on a disk, where no reader is waited for, and a call costs more than 256 bytes do.
const DISK_PIECE: usize = 4 << 10;

/// A bounded queue of bytes and the thread that writes them. What is queued when this is dropped is written still, as long as the
/// process lives.
pub struct QueuedWriter(Arc<Shared>);

struct Shared {
    /// What the log calls it.
    name: &'static str,
    /// Most bytes that wait to be written, or are being written.
    limit: u64,
    /// Bytes that the file takes.
    most: u64,
    /// Up to how many bytes are put together.
    piece: usize,
    state: Mutex<State>,
    /// There is something to write, or nothing comes any more.
    filled: Condvar,
    /// Something was written.
    emptied: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Vec<u8>>,
    /// Bytes that were ever queued.
    queued: u64,
    /// How many of these are written, or could not be.
    written: u64,
    /// Who waits for room, in the order in which they came.
    pushing: VecDeque<u64>,
    /// Pushes that ever waited.
    waited: u64,
    /// Somebody has waited for room for as long as it was ready to, and nothing was written since.
    stuck: bool,
    /// Bytes lost since it is stuck.
    lost: u64,
    closed: bool,
}

impl QueuedWriter {
    /// A queue of up to `limit` bytes before `file`; the log calls it `name`.
    ///
    /// # Errors
    /// There can be no more threads.
    pub fn new(name: &'static str, file: File, limit: u64) -> io::Result<Self> {
        Self::bounded(name, file, limit, u64::MAX)
    }

    /// The same for a file on a disk, which is to be no longer than `most` bytes: what comes while it is full is lost.
    ///
    /// # Errors
    /// There can be no more threads.
    pub fn bounded(name: &'static str, file: File, limit: u64, most: u64) -> io::Result<Self> {
        let (filled, emptied) = (Condvar::new(), Condvar::new());
        let piece = if most == u64::MAX { PIECE } else { DISK_PIECE };
        let shared = Arc::new(Shared { name, limit, most, piece, state: Mutex::default(), filled, emptied });
        let of_thread = shared.clone();
        sandbox::start(WRITER, name.trim_start_matches('-').into(), move || {
            sandbox::give_up_files();
            of_thread.write(file);
        })?;
        Ok(Self(shared))
    }

    /// Queues `bytes` to be written whole; `false` if there is no room.
    #[must_use]
    pub fn try_push(&self, bytes: &[u8]) -> bool {
        let state = self.0.lock();
        let room = self.0.has_room(&state, bytes);
        if room {
            self.0.append(state, bytes);
        }
        room
    }

    /// Queues `bytes` to be written whole, and waits up to `patience` for room, however little is written meanwhile. Who came first is
    /// first to get room, so a few bytes wait behind many. Once there was none, what there is no room for is lost at once, until
    /// something is written again; the log then tells how much it was.
    pub fn push(&self, bytes: &[u8], patience: Duration) {
        let mut state = self.0.lock();
        let goes_on = |state: &State, first: bool| state.stuck || first && self.0.has_room(state, bytes);
        if !goes_on(&state, state.pushing.is_empty()) {
            let turn = state.waited;
            state.waited += 1;
            state.pushing.push_back(turn);
            let waits = |state: &mut State| !goes_on(state, state.pushing.front() == Some(&turn));
            let outcome;
            let waited = self.0.emptied.wait_timeout_while(state, patience, waits);
            (state, outcome) = waited.unwrap_or_else(PoisonError::into_inner);
            state.stuck |= outcome.timed_out();
            state.pushing.retain(|other| *other != turn);
            // The next may find room too, or not have to wait.
            self.0.emptied.notify_all();
        }
        if self.0.has_room(&state, bytes) {
            self.0.append(state, bytes);
        } else {
            state.lost += bytes.len() as u64;
        }
    }

    /// Waits until all so far is written: as long as something is at least every `patience`, and not longer than `limit`. Returns
    /// whether it is.
    #[must_use]
    pub fn drain(&self, patience: Duration, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        let mut state = self.0.lock();
        let all = state.queued;
        while state.written < all {
            let progress;
            let left = end.saturating_duration_since(Instant::now());
            (state, progress) = self.0.wait_for_progress(state, patience.min(left));
            if !progress {
                return false;
            }
        }
        true
    }
}

impl Drop for QueuedWriter {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.filled.notify_one();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether `bytes` fit; alone, they do however many they are. So do a few wherever there is any room: who writes single bytes would
    /// fill that before others find enough of it.
    fn has_room(&self, state: &State, bytes: &[u8]) -> bool {
        let unwritten = state.queued - state.written;
        unwritten == 0
            || unwritten + bytes.len() as u64 <= self.limit
            || (unwritten < self.limit && bytes.len() <= PIECE)
    }

    fn append(&self, mut state: MutexGuard<'_, State>, bytes: &[u8]) {
        let was_empty = state.waiting.is_empty();
        match state.waiting.back_mut().filter(|last| last.len() + bytes.len() <= self.piece) {
            Some(last) => last.extend_from_slice(bytes),
            None => state.waiting.push_back(bytes.to_vec()),
        }
        state.queued += bytes.len() as u64;
        drop(state);
        if was_empty {
            self.filled.notify_one();
        }
    }

    /// Waits until something is written; `false` if nothing was for `patience`.
    fn wait_for_progress<'a>(&self, state: MutexGuard<'a, State>, patience: Duration) -> (MutexGuard<'a, State>, bool) {
        let before = state.written;
        let waited = self.emptied.wait_timeout_while(state, patience, |state| state.written == before);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let progress = state.written != before;
        (state, progress)
    }

    /// Whether the file takes so many bytes more. Whoever cuts it short makes room.
    fn check_size(&self, file: &File, more: usize) -> io::Result<()> {
        if self.most == u64::MAX {
            return Ok(());
        }
        let size = u64::try_from(fstat(file)?.st_size).unwrap_or(u64::MAX);
        if size.saturating_add(more as u64) <= self.most {
            return Ok(());
        }
        Err(io::Error::other(format!("the file has {size} bytes, and takes no more than {}", self.most)))
    }

    /// The thread: writes what comes, until nothing can come any more.
    ///
    /// It alone writes to the log, which may go where nobody reads either.
    fn write(&self, mut file: File) {
        let mut failing = false;
        loop {
            let state = self.lock();
            let next = self.filled.wait_while(state, |state| state.waiting.is_empty() && !state.closed);
            let Some(piece) = next.unwrap_or_else(PoisonError::into_inner).waiting.pop_front() else { return };
            let result = self.check_size(&file, piece.len()).and_then(|()| file.write_all(&piece));

            let mut state = self.lock();
            state.written += piece.len() as u64;
            state.stuck = false;
            let lost = mem::take(&mut state.lost);
            drop(state);
            self.emptied.notify_all();
            if lost > 0 {
                log::warn!("{}: {lost} bytes are lost: nobody read them in time", self.name);
            }
            match result {
                Ok(()) => failing = false,
                // Once, as there is no limit to what may follow.
                Err(error) if !failing => {
                    failing = true;
                    log::warn!("{}: output is lost: {error}{}", self.name, file_size::hint(&error));
                }
                Err(_) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{PipeReader, Read};
    use std::os::fd::OwnedFd;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use rustix::fs::{OFlags, fcntl_setfl};

    use super::*;

    const LIMIT: u64 = 16 << 10;
    const PATIENCE: Duration = Duration::from_millis(300);
    /// Longest time that anything else may take.
    const LONG: Duration = Duration::from_secs(20);

    fn pipe() -> (PipeReader, QueuedWriter) {
        let (reader, writer) = io::pipe().unwrap();
        (reader, QueuedWriter::new("--test", File::from(OwnedFd::from(writer)), LIMIT).unwrap())
    }

    #[test]
    fn file_that_is_full_takes_more_once_it_is_cut_short() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let appending = File::options().append(true).open(file.path()).unwrap();
        let writer = QueuedWriter::bounded("--test", appending, LIMIT, 1000).unwrap();
        let len = || file.as_file().metadata().unwrap().len();
        for _ in 0..30 {
            writer.push(&[7; 100], PATIENCE);
            assert!(writer.drain(LONG, LONG));
        }
        assert_eq!(len(), 1000);
        file.as_file().set_len(0).unwrap();
        writer.push(&[8; 100], PATIENCE);
        assert!(writer.drain(LONG, LONG));
        assert_eq!(std::fs::read(file.path()).unwrap(), [8; 100]);
    }

    /// Bytes of which no two neighbouring stretches are the same.
    fn bytes(len: u32) -> Vec<u8> {
        (0..len / 4).flat_map(u32::to_le_bytes).collect()
    }

    #[test]
    fn reader_that_takes_nothing_holds_up_once_and_gets_what_was_queued() {
        let (mut reader, queue) = pipe();
        let bytes = bytes(200_000);
        let start = Instant::now();

        bytes.chunks(1).for_each(|byte| queue.push(byte, PATIENCE));
        let drained = queue.drain(Duration::from_millis(10), LONG);

        assert!((PATIENCE..LONG).contains(&start.elapsed()), "{:?}", start.elapsed());
        assert!(!drained);
        let lost = queue.0.lock().lost;
        // What the pipe and the queue hold was not lost; the pipe's pages need not be full.
        assert!((100_000..125_000).contains(&lost), "{lost}");
        let mut read = vec![0; 200_000 - usize::try_from(lost).unwrap()];
        reader.read_exact(&mut read).unwrap();
        assert!(bytes.starts_with(&read));
        // From now on it is waited for again.
        assert!(queue.drain(LONG, LONG));
        assert!(!queue.0.lock().stuck);
        assert_eq!(queue.0.lock().lost, 0);
        queue.push(b"after", PATIENCE);
        drop(queue);
        let mut rest = String::new();
        reader.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "after");
    }

    #[test]
    fn slow_reader_loses_nothing() {
        let (mut reader, queue) = pipe();
        let bytes = bytes(200_000);
        let slow = thread::spawn(move || {
            let (mut all, mut page) = (Vec::new(), [0; 4096]);
            loop {
                thread::sleep(Duration::from_millis(10));
                match reader.read(&mut page).unwrap() {
                    0 => return all,
                    read => all.extend_from_slice(&page[..read]),
                }
            }
        });

        bytes.chunks(1).for_each(|byte| queue.push(byte, LONG));
        assert!(queue.drain(LONG, LONG));
        drop(queue);

        assert!(slow.join().unwrap() == bytes);
    }

    /// A queue that has no room, as its pipe has none.
    fn full() -> (PipeReader, QueuedWriter) {
        let (reader, writer) = io::pipe().unwrap();
        // Each read then makes room for one more write, not for a page of them.
        fcntl_setfl(&writer, OFlags::DIRECT).unwrap();
        let queue = QueuedWriter::new("--test", File::from(OwnedFd::from(writer)), LIMIT).unwrap();
        let fill = || while queue.try_push(&[b'x'; PIECE]) {};
        fill();
        while queue.drain(PATIENCE, LONG) || queue.try_push(&[b'x'; PIECE]) {
            fill();
        }
        (reader, queue)
    }

    #[test]
    fn who_came_first_gets_room_first_though_another_needs_less() {
        let (mut reader, queue) = full();
        let queue = Arc::new(queue);
        let before = queue.0.lock().queued;
        let wait_for = |pushing| {
            let start = Instant::now();
            while queue.0.lock().pushing.len() < pushing {
                assert!(start.elapsed() < LONG, "nobody waits");
                thread::sleep(Duration::from_millis(1));
            }
        };
        let pushes = [(vec![b'z'; 4 * PIECE], 1), (vec![b'y'], 2)].map(|(bytes, pushing)| {
            let of_thread = queue.clone();
            let push = thread::spawn(move || of_thread.push(&bytes, LONG));
            wait_for(pushing);
            push
        });

        let read = thread::spawn(move || {
            // What a read has no room for of one write is lost.
            let (mut all, mut page) = (Vec::new(), [0; 4096]);
            loop {
                match reader.read(&mut page).unwrap() {
                    0 => return all,
                    read => all.extend_from_slice(&page[..read]),
                }
            }
        });
        pushes.into_iter().for_each(|push| push.join().unwrap());
        drop(queue);

        let all = read.join().unwrap();
        let came = [vec![b'z'; 4 * PIECE], vec![b'y']].concat();
        assert!(all[usize::try_from(before).unwrap()..] == came, "another order");
    }

    #[test]
    fn who_writes_single_bytes_leaves_room_for_who_writes_more_at_a_time() {
        let (mut reader, queue) = full();
        let (queue, over) = (Arc::new(queue), Arc::new(AtomicBool::new(false)));
        let until = over.clone();
        let slow = thread::spawn(move || {
            let (mut buffer, mut pieces) = ([0; PIECE], 0);
            while reader.read(&mut buffer).unwrap() != 0 {
                pieces += buffer.iter().filter(|byte| **byte == b'z').count();
                buffer.fill(0);
                // Each read makes room for one more piece.
                if !until.load(Ordering::Relaxed) {
                    thread::sleep(PATIENCE / 3);
                }
            }
            pieces
        });
        let (other, until) = (queue.clone(), over.clone());
        let single = thread::spawn(move || {
            while !until.load(Ordering::Relaxed) {
                other.push(b"y", PATIENCE);
            }
        });

        (0..6).for_each(|_| queue.push(&[b'z'; PIECE], PATIENCE));

        over.store(true, Ordering::Relaxed);
        single.join().unwrap();
        drop(queue);
        assert_eq!(slow.join().unwrap(), 6 * PIECE);
    }

    #[test]
    fn reader_that_takes_a_little_now_and_then_holds_one_push_up_for_no_longer() {
        let (mut reader, queue) = full();
        let slow = thread::spawn(move || {
            while reader.read(&mut [0]).unwrap() != 0 {
                thread::sleep(PATIENCE / 5);
            }
        });

        let queued = queue.0.lock().queued;
        let start = Instant::now();
        // There is room for it when all else is written, and not before.
        queue.push(&[b'y'; 64 * PIECE], PATIENCE);
        let time = start.elapsed();
        let lost = queue.0.lock().queued == queued;

        drop((queue, slow));
        assert!((PATIENCE..PATIENCE * 4).contains(&time), "{time:?}");
        assert!(lost);
    }

    #[test]
    fn drain_ends_at_its_limit_however_the_reader_reads() {
        let (mut reader, queue) = pipe();
        // More than a pipe takes. That is 60,000 or so with pieces of odd sizes, none of which is in two pages: there is room for all.
        bytes(72_000).chunks(1).for_each(|byte| queue.push(byte, LONG));
        // Not even a page is free in the pipe when it is over.
        let start = Instant::now();
        assert!(!queue.drain(LONG, Duration::from_millis(50)));
        assert!(start.elapsed() < LONG);
        drop(queue);
        let mut all = Vec::new();
        reader.read_to_end(&mut all).unwrap();
        assert!(all == bytes(72_000), "what is queued comes, even when the queue is gone");
    }

    #[test]
    fn closed_pipe_costs_the_output_only() {
        let (reader, queue) = pipe();
        drop(reader);
        let start = Instant::now();
        bytes(200_000).chunks(1).for_each(|byte| queue.push(byte, LONG));
        assert!(queue.drain(LONG, LONG));
        assert!(start.elapsed() < LONG);
    }

    #[test]
    fn what_has_no_room_is_not_taken_in_part() {
        let (mut reader, queue) = pipe();
        let big = [b'x'; 10_000];
        let taken = (0..20).filter(|_| queue.try_push(&big)).count();
        drop(queue);
        let mut all = Vec::new();
        reader.read_to_end(&mut all).unwrap();
        assert_eq!(all.len(), taken * big.len());
        assert!((1..20).contains(&taken), "{taken}");
    }
}

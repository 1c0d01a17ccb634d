// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Output by a thread of its own: the file may be a pipe whose reader has stopped to read, and the VM must not stop with it. The log,
//! events and consoles are written so.

mod clock;
mod output;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::mem;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use devices::{file_size, sandbox};

use self::clock::{Clock, HostClock};
use self::output::{Notice, Output, Pen, Written, lines};
use crate::process::thread_roles::WRITER;

/// Most bytes that are joined for one write. A slow line (9600 bits a second) takes them in a third of a second, so each write that
/// returns shows that the reader reads.
const PIECE: usize = 256;
/// The same for a file on a disk, where no reader is waited for, and a call costs more than 256 bytes do.
const DISK_PIECE: usize = 4 << 10;

/// Longest time that a caller waits at once.
const STEP: Duration = Duration::from_millis(100);

/// A bounded queue of bytes or lines, and the thread that writes them. After a drop the thread writes the rest, as long as the process
/// lives.
pub struct QueuedWriter(Arc<Shared>);

struct Shared {
    /// Its name in the log.
    name: &'static str,
    /// Most bytes that wait to be written, or are being written.
    limit: u64,
    /// Up to how many bytes are put together.
    piece: usize,
    /// Reports lost lines; `None` if this is no queue of lines.
    notice: Option<Notice>,
    /// True if the log does not report lost output: it is the log itself.
    quiet: bool,
    clock: Box<dyn Clock>,
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
    /// Bytes of these that were written, or could not be.
    written: u64,
    /// Callers that wait for room, in order of arrival.
    pushing: VecDeque<u64>,
    /// Pushes that ever waited.
    waited: u64,
    /// True if a push timed out and nothing was written since.
    stuck: bool,
    /// True if a drain timed out and nothing was written since.
    abandoned: bool,
    /// True if a line found no room and the queue has been more than half full since.
    full: bool,
    /// Bytes or lines that were not queued, and that no report covers yet.
    untold: u64,
    /// Bytes or lines that were ever lost.
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
        let piece = if most == u64::MAX { PIECE } else { DISK_PIECE };
        Self::start(Shared::new(name, limit, piece, None, Box::new(HostClock)), Pen::new(file, most))
    }

    /// A queue of lines. Where lines are lost, the stream gets the line that `notice` makes of their number.
    ///
    /// # Errors
    /// There can be no more threads.
    pub fn of_lines(
        name: &'static str,
        file: File,
        limit: u64,
        notice: impl Fn(u64) -> Vec<u8> + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let shared = Shared::new(name, limit, PIECE, Some(Box::new(notice)), Box::new(HostClock));
        Self::start(shared, Pen::new(file, u64::MAX))
    }

    /// The same for lines of the log itself, which does not report that they are lost. Lines wait until the thread is started.
    pub fn of_log(
        name: &'static str,
        file: File,
        limit: u64,
        notice: impl Fn(u64) -> Vec<u8> + Send + Sync + 'static,
    ) -> (Self, WriterThread) {
        let mut shared = Shared::new(name, limit, PIECE, Some(Box::new(notice)), Box::new(HostClock));
        shared.quiet = true;
        let shared = Arc::new(shared);
        (Self(shared.clone()), WriterThread { shared, file })
    }

    fn start(shared: Shared, pen: Pen<impl Output + 'static>) -> io::Result<Self> {
        let shared = Arc::new(shared);
        start_thread(shared.clone(), pen)?;
        Ok(Self(shared))
    }

    /// Queues one or more whole lines, and never waits. Returns false if there is no room: then the lines are lost and counted. From then
    /// on all lines are lost until the queue is half empty.
    pub fn push_lines(&self, text: &[u8]) -> bool {
        let mut state = self.0.lock();
        if state.full || !self.0.has_room(&state, text) {
            state.full = true;
            state.untold += lines(text);
            state.lost += lines(text);
            return false;
        }
        self.0.tell_lost(&mut state);
        self.0.append(&mut state, text);
        true
    }

    /// Counts lines that were lost before they came here. They are reported with the next line.
    pub fn add_lost(&self, lines: u64) {
        let mut state = self.0.lock();
        state.untold += lines;
        state.lost += lines;
    }

    /// Bytes, or lines of a queue of lines, that were ever lost.
    pub fn lost(&self) -> u64 {
        self.0.lock().lost
    }

    /// Queues `bytes` to be written whole, and waits at most `patience` for room. Callers get room in order of arrival. After
    /// a timeout, bytes without room are lost at once until something is written again. The log then reports how many.
    pub fn push(&self, bytes: &[u8], patience: Duration) {
        let mut state = self.0.lock();
        let goes_on = |state: &State, first: bool| state.stuck || first && self.0.has_room(state, bytes);
        if !goes_on(&state, state.pushing.is_empty()) {
            let turn = state.waited;
            state.waited += 1;
            state.pushing.push_back(turn);
            let waits = |state: &State| !goes_on(state, state.pushing.front() == Some(&turn));
            let mut left = patience;
            while waits(&state) {
                if left.is_zero() {
                    state.stuck = true;
                } else {
                    let waited;
                    (state, waited) = self.0.wait(state, left);
                    left -= waited;
                }
            }
            state.pushing.retain(|other| *other != turn);
            // The next may find room too, or not have to wait.
            self.0.emptied.notify_all();
        }
        if self.0.has_room(&state, bytes) {
            self.0.append(&mut state, bytes);
        } else {
            state.untold += bytes.len() as u64;
            state.lost += bytes.len() as u64;
        }
    }

    /// The same as [`Self::drain`], but returns at once if a drain timed out and nothing was written since.
    #[must_use]
    pub fn drain_once(&self, limit: Duration) -> bool {
        let abandoned = self.0.lock().abandoned;
        !abandoned && self.drain(limit, limit)
    }

    /// Waits until all so far is written: as long as something is at least every `patience`, and not longer than `limit`. Returns
    /// whether it is.
    #[must_use]
    pub fn drain(&self, patience: Duration, limit: Duration) -> bool {
        let mut state = self.0.lock();
        let all = state.queued;
        let (mut left, mut left_in_all) = (patience, limit);
        while state.written < all {
            let next = left.min(left_in_all);
            if next.is_zero() {
                state.abandoned = true;
                return false;
            }
            let before = state.written;
            let waited;
            (state, waited) = self.0.wait(state, next);
            left_in_all -= waited;
            left = if state.written == before { left - waited } else { patience };
        }
        true
    }
}

/// The thread of a queue, which is not started yet.
pub struct WriterThread {
    shared: Arc<Shared>,
    file: File,
}

impl WriterThread {
    /// Starts it.
    ///
    /// # Errors
    /// There can be no more threads.
    pub fn start(self) -> io::Result<()> {
        start_thread(self.shared, Pen::new(self.file, u64::MAX))
    }
}

fn start_thread(shared: Arc<Shared>, pen: Pen<impl Output + 'static>) -> io::Result<()> {
    sandbox::start(WRITER, shared.name.trim_start_matches('-').into(), move || {
        sandbox::give_up_files();
        shared.write(pen);
    })?;
    Ok(())
}

impl Drop for QueuedWriter {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.filled.notify_one();
    }
}

impl Shared {
    fn new(name: &'static str, limit: u64, piece: usize, notice: Option<Notice>, clock: Box<dyn Clock>) -> Self {
        let (filled, emptied) = (Condvar::new(), Condvar::new());
        Self { name, limit, piece, notice, quiet: false, clock, state: Mutex::default(), filled, emptied }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until something was written or the time is over: at most `left`, and at most a step. Returns how much of `left` that took.
    ///
    /// A machine that stands still meanwhile takes a step, as the writing thread stood still too.
    fn wait<'a>(&self, state: MutexGuard<'a, State>, left: Duration) -> (MutexGuard<'a, State>, Duration) {
        let (begun, step) = (self.clock.now(), left.min(STEP));
        let state = self.clock.wait(&self.emptied, state, step);
        (state, self.clock.now().saturating_duration_since(begun).min(step))
    }

    /// True if `bytes` fit. An empty queue takes any number of bytes, and any room is enough for a few: otherwise a caller that pushes
    /// single bytes would leave no room for larger pushes.
    fn has_room(&self, state: &State, bytes: &[u8]) -> bool {
        let unwritten = state.queued - state.written;
        unwritten == 0
            || unwritten + bytes.len() as u64 <= self.limit
            || (unwritten < self.limit && bytes.len() <= PIECE)
    }

    fn append(&self, state: &mut State, bytes: &[u8]) {
        let was_empty = state.waiting.is_empty();
        match state.waiting.back_mut().filter(|last| last.len() + bytes.len() <= self.piece) {
            Some(last) => last.extend_from_slice(bytes),
            None => state.waiting.push_back(bytes.to_vec()),
        }
        state.queued += bytes.len() as u64;
        if was_empty {
            self.filled.notify_one();
        }
    }

    /// Reports lines that were lost, in their place: after what waits, and before any later line.
    fn tell_lost(&self, state: &mut State) {
        if let Some(notice) = &self.notice
            && state.untold > 0
        {
            let line = notice(mem::take(&mut state.untold));
            self.append(state, &line);
        }
    }

    /// A piece was written, or was lost.
    fn wrote(&self, len: usize, lost: u64) {
        let mut state = self.lock();
        state.written += len as u64;
        state.lost += lost;
        (state.stuck, state.abandoned) = (false, false);
        if state.full && state.queued - state.written <= self.limit / 2 {
            state.full = false;
            self.tell_lost(&mut state);
        }
        let untold = if self.notice.is_none() { mem::take(&mut state.untold) } else { 0 };
        drop(state);
        self.emptied.notify_all();
        if untold > 0 {
            log::warn!("{}: {untold} bytes are lost: nobody read them in time", self.name);
        }
    }

    /// The thread: writes what comes, until nothing can come any more.
    fn write(&self, mut pen: Pen<impl Output>) {
        let mut failing = false;
        loop {
            let state = self.lock();
            let next = self.filled.wait_while(state, |state| state.waiting.is_empty() && !state.closed);
            let Some(piece) = next.unwrap_or_else(PoisonError::into_inner).waiting.pop_front() else { return };
            let Written { lost, result } = match &self.notice {
                Some(notice) => pen.write_lines(&piece, notice),
                None => pen.write_bytes(&piece),
            };
            self.wrote(piece.len(), lost);
            match result {
                Ok(()) => failing = false,
                // Once, as there is no limit to what may follow.
                Err(error) if !failing && !self.quiet => {
                    failing = true;
                    log::warn!("{}: output is lost: {error}{}", self.name, file_size::hint(&error));
                }
                Err(_) => {}
            }
        }
    }
}

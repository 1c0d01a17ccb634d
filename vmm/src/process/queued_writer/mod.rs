// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Output by a separate thread, for the log, events and consoles. The file may be a pipe whose reader has stopped reading. Such a reader
//! must not stop the VM.

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

/// Maximum bytes that the queue combines into one write. A slow serial line (9600 bits a second) transmits these bytes in about 0.3 s. So
/// even with a slow reader, writes complete often enough to show that the reader still reads.
const PIECE: usize = 256;
/// Maximum bytes that the queue combines into one write to a file on a disk. A disk has no slow reader, and a system call costs more than
/// writing 256 bytes to a disk.
const DISK_PIECE: usize = 4 << 10;

/// Maximum time of one step of a wait. A caller waits in several steps.
const STEP: Duration = Duration::from_millis(100);

/// Bounded queue of bytes or lines, and the thread that writes them. After the queue is dropped, the thread continues until it has written
/// all queued bytes, or the process ends.
pub struct QueuedWriter(Arc<Shared>);

struct Shared {
    /// Name of the stream in the log.
    name: &'static str,
    /// Maximum bytes that are queued or being written.
    limit: u64,
    /// Maximum bytes that the queue combines into one write.
    piece: usize,
    /// Function that makes the line that reports lost lines. `None` if this is not a queue of lines.
    notice: Option<Notice>,
    /// True if failed writes are not logged, because this queue belongs to the log itself.
    quiet: bool,
    clock: Box<dyn Clock>,
    state: Mutex<State>,
    /// Notified when bytes are queued, or when the queue is closed.
    filled: Condvar,
    /// Notified when bytes were written.
    emptied: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Vec<u8>>,
    /// Total bytes queued so far.
    queued: u64,
    /// Total bytes of `queued` that the thread has written, or failed to write.
    written: u64,
    /// Numbers of the callers that wait for room, in order of arrival.
    pushing: VecDeque<u64>,
    /// Number of callers that had to wait for room so far.
    waited: u64,
    /// True if a push timed out and nothing was written since.
    stuck: bool,
    /// True if a drain timed out and nothing was written since.
    abandoned: bool,
    /// True if a line found no room and the queue has been more than half full since.
    full: bool,
    /// Number of bytes or lines that were lost before they were queued, and are not reported yet.
    unreported: u64,
    /// Number of bytes or lines lost so far.
    lost: u64,
    closed: bool,
}

impl QueuedWriter {
    /// Creates a queue of up to `limit` bytes for `file`, which the log calls `name`.
    ///
    /// # Errors
    /// The process cannot start more threads.
    pub fn new(name: &'static str, file: File, limit: u64) -> io::Result<Self> {
        Self::bounded(name, file, limit, u64::MAX)
    }

    /// Creates a queue for a file on a disk. The file may grow to at most `most` bytes. While the file is full, output is lost.
    ///
    /// # Errors
    /// The process cannot start more threads.
    pub fn bounded(name: &'static str, file: File, limit: u64, most: u64) -> io::Result<Self> {
        let piece = if most == u64::MAX { PIECE } else { DISK_PIECE };
        Self::start(Shared::new(name, limit, piece, None, Box::new(HostClock)), Pen::new(file, most))
    }

    /// Creates a queue of lines. If lines are lost, `notice` makes a line from their number, and this line is written to the stream.
    ///
    /// # Errors
    /// The process cannot start more threads.
    pub fn of_lines(
        name: &'static str,
        file: File,
        limit: u64,
        notice: impl Fn(u64) -> Vec<u8> + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let shared = Shared::new(name, limit, PIECE, Some(Box::new(notice)), Box::new(HostClock));
        Self::start(shared, Pen::new(file, u64::MAX))
    }

    /// Creates a queue for lines of the log itself. Failed writes of this queue are not logged. Lines stay in the queue until the returned
    /// thread is started.
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

    /// Queues one or more whole lines, without waiting. If the queue has no room, drops and counts the lines, and returns false. Further
    /// lines are also dropped, until the queue is half empty.
    pub fn push_lines(&self, text: &[u8]) -> bool {
        let mut state = self.0.lock();
        if state.full || !self.0.has_room(&state, text) {
            state.full = true;
            state.unreported += lines(text);
            state.lost += lines(text);
            return false;
        }
        self.0.report_lost(&mut state);
        self.0.append(&mut state, text);
        true
    }

    /// Counts lines that were lost before they reached this queue. Before the next line, a notice reports the number of these lines.
    pub fn add_lost(&self, lines: u64) {
        let mut state = self.0.lock();
        state.unreported += lines;
        state.lost += lines;
    }

    /// Returns the number of bytes lost so far. For a queue of lines, returns the number of lines lost so far.
    pub fn lost(&self) -> u64 {
        self.0.lock().lost
    }

    /// Queues all of `bytes` or nothing. Waits at most `timeout` for room. Callers get room in order of arrival. After a timeout, calls
    /// that find no room drop their bytes without waiting, until the thread has written something again. Then the log reports the number of
    /// dropped bytes.
    pub fn push(&self, bytes: &[u8], timeout: Duration) {
        let mut state = self.0.lock();
        let goes_on = |state: &State, first: bool| state.stuck || first && self.0.has_room(state, bytes);
        if !goes_on(&state, state.pushing.is_empty()) {
            let turn = state.waited;
            state.waited += 1;
            state.pushing.push_back(turn);
            let waits = |state: &State| !goes_on(state, state.pushing.front() == Some(&turn));
            let mut left = timeout;
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
            // The next caller may also find room, or may no longer need to wait.
            self.0.emptied.notify_all();
        }
        if self.0.has_room(&state, bytes) {
            self.0.append(&mut state, bytes);
        } else {
            state.unreported += bytes.len() as u64;
            state.lost += bytes.len() as u64;
        }
    }

    /// Like [`Self::drain`], but returns immediately if a drain timed out and nothing was written since.
    #[must_use]
    pub fn drain_once(&self, limit: Duration) -> bool {
        let abandoned = self.0.lock().abandoned;
        !abandoned && self.drain(limit, limit)
    }

    /// Waits until everything queued so far is written. Gives up after `limit`, or if nothing is written for `timeout`. Returns true if
    /// everything is written.
    #[must_use]
    pub fn drain(&self, timeout: Duration, limit: Duration) -> bool {
        let mut state = self.0.lock();
        let all = state.queued;
        let (mut left, mut left_in_all) = (timeout, limit);
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
            left = if state.written == before { left - waited } else { timeout };
        }
        true
    }
}

/// Thread of a queue, not started yet.
pub struct WriterThread {
    shared: Arc<Shared>,
    file: File,
}

impl WriterThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// The process cannot start more threads.
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

    /// Waits until something was written, but at most `left` and at most one step. Returns the part of `left` that was used.
    ///
    /// If the whole machine was suspended meanwhile, the suspension counts as at most one step, because the writing thread was suspended
    /// too.
    fn wait<'a>(&self, state: MutexGuard<'a, State>, left: Duration) -> (MutexGuard<'a, State>, Duration) {
        let (begun, step) = (self.clock.now(), left.min(STEP));
        let state = self.clock.wait(&self.emptied, state, step);
        (state, self.clock.now().saturating_duration_since(begun).min(step))
    }

    /// True if the queue has room for `bytes`. An empty queue accepts any number of bytes. If any room is left, the queue accepts up to
    /// [`PIECE`] bytes. Without this rule, a caller that pushes single bytes would leave no room for larger pushes.
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

    /// Queues the notice about lost lines, after the lines that are already queued.
    fn report_lost(&self, state: &mut State) {
        if let Some(notice) = &self.notice
            && state.unreported > 0
        {
            let line = notice(mem::take(&mut state.unreported));
            self.append(state, &line);
        }
    }

    /// Records that the thread has finished a piece of `len` bytes. `lost` is the number of the piece's bytes or lines that could not be
    /// written.
    fn wrote(&self, len: usize, lost: u64) {
        let mut state = self.lock();
        state.written += len as u64;
        state.lost += lost;
        (state.stuck, state.abandoned) = (false, false);
        if state.full && state.queued - state.written <= self.limit / 2 {
            state.full = false;
            self.report_lost(&mut state);
        }
        let unreported = if self.notice.is_none() { mem::take(&mut state.unreported) } else { 0 };
        drop(state);
        self.emptied.notify_all();
        if unreported > 0 {
            log::warn!(
                "{}: {unreported} bytes of output are lost, because they could not be written in time; use a faster disk or reader",
                self.name
            );
        }
    }

    /// Body of the thread: writes everything that is queued, until the queue is closed.
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
                // Only the first of successive failures is logged, because a failure may repeat without limit.
                Err(error) if !failing && !self.quiet => {
                    failing = true;
                    log::warn!("{}: output is lost: {error}{}", self.name, file_size::hint(&error));
                }
                Err(_) => {}
            }
        }
    }
}

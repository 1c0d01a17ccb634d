// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Output to standard error and to the log file. A separate thread writes each of these streams. So a reader that stops reading delays
//! neither API clients nor the end of the program.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Write};
use std::mem;
use std::os::fd::AsFd;
use std::panic::{self, PanicHookInfo};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use carom_api::cli::streams;
use jiff::Timestamp;

use crate::process::queued_writer::{QueuedWriter, WriterThread};

/// Maximum bytes in the queue of a stream: a few thousand lines. Further lines are dropped and counted.
const MAX_WAITING: u64 = 256 << 10;
/// Maximum time that a panicking thread waits until its message is written. The thread waits because the panic may abort the process.
const PANIC_MESSAGE: Duration = Duration::from_secs(1);
/// Maximum time to wait, for each stream, until its queued lines are written.
const LAST_LINES: Duration = Duration::from_secs(2);

static STANDARD_ERROR: OnceLock<QueuedWriter> = OnceLock::new();
static LOG_FILE: OnceLock<QueuedWriter> = OnceLock::new();
/// Threads that will write the streams and are not started yet.
static UNSTARTED: Mutex<Vec<WriterThread>> = Mutex::new(Vec::new());

/// Returns the line that reports dropped lines.
fn dropped(count: u64) -> Vec<u8> {
    let now = Timestamp::now();
    format!("[{now:.0} WARN ] {count} lines dropped: the log was not read in time, or could not be written; check its reader, or the free space of its disk\n")
        .into_bytes()
}

/// Guard that waits in its `drop` until the queued lines are written: see [`flush`].
#[must_use]
pub struct LastLines(());

/// Queues all further output to standard error, including panic messages, for the thread that [`start_threads`] starts. Call this function
/// once, before [`devices::crash::leave_reports_in`].
///
/// # Errors
/// The process cannot open more descriptors.
pub fn start() -> io::Result<LastLines> {
    // `Stderr` is not used, because a thread that blocks in a write would hold the lock of `Stderr`.
    let file = File::from(io::stderr().as_fd().try_clone_to_owned()?);
    let (queue, thread) = QueuedWriter::of_log("stderr", file, MAX_WAITING, dropped);
    STANDARD_ERROR.set(queue).map_err(|_| io::Error::other("the output to standard error was already set up"))?;
    unstarted().push(thread);
    panic::set_hook(Box::new(report_panic));
    Ok(LastLines(()))
}

/// Writes the log to `file` instead of standard error, through a queue. Call this function once.
///
/// # Errors
/// The log already has a file.
pub fn log_to(file: File) -> io::Result<()> {
    let (queue, thread) = QueuedWriter::of_log("--log-file", file, MAX_WAITING, dropped);
    LOG_FILE.set(queue).map_err(|_| io::Error::other("the log file was already set up"))?;
    unstarted().push(thread);
    Ok(())
}

/// Starts the threads that write the streams. Until this call, lines are only queued. The program serves clients before this call, so that
/// they do not wait for the start of the threads.
///
/// # Errors
/// The process cannot start more threads.
pub fn start_threads() -> io::Result<()> {
    let threads = mem::take(&mut *unstarted());
    threads.into_iter().try_for_each(WriterThread::start)
}

fn unstarted() -> MutexGuard<'static, Vec<WriterThread>> {
    UNSTARTED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Writes a line to standard error, after all earlier lines. If standard error has a queue, this function never waits.
pub fn complain(program: &str, text: &str) {
    match STANDARD_ERROR.get() {
        None => streams::complain(program, text),
        Some(queue) => {
            // If the queue drops the line, it counts the line.
            let _ = queue.push_lines(format!("{program}: {text}\n").as_bytes());
        }
    }
}

/// Returns the number of dropped lines of the log and of standard error.
pub fn lost_lines() -> u64 {
    streams().map(QueuedWriter::lost).sum()
}

fn streams() -> impl Iterator<Item = &'static QueuedWriter> {
    [&LOG_FILE, &STANDARD_ERROR].into_iter().filter_map(OnceLock::get)
}

/// Waits until all queued lines are written, but at most 2 s for each stream. If a stream's reader reads nothing, only the first call
/// waits for this stream.
pub fn flush() {
    // A program that fails at its start has not started the threads yet. If the threads cannot start, the wait below ends after its time
    // limit.
    let _ = start_threads();
    for stream in streams() {
        // Lines that are lost now cannot be reported anywhere.
        let _ = stream.drain_once(LAST_LINES);
    }
}

impl Drop for LastLines {
    fn drop(&mut self) {
        flush();
    }
}

/// Stream that `env_logger` writes the log to, one line at a time.
pub struct LogWriter;

impl Write for LogWriter {
    fn write(&mut self, lines: &[u8]) -> io::Result<usize> {
        if let Some(queue) = streams().next() {
            queue.push_lines(lines);
        }
        Ok(lines.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn report_panic(panic: &PanicHookInfo<'_>) {
    let trace = Backtrace::capture();
    let mut text = String::new();
    let thread = thread::current();
    let name = thread.name().unwrap_or("unnamed");
    let message = panic.payload_as_str().unwrap_or("a message that is not text");
    let place = panic.location().map_or_else(|| "an unknown place".into(), ToString::to_string);
    // Writing to a string does not fail.
    let _ = writeln!(text, "thread '{name}' panicked at {place}:\n{message}");
    let _ = match trace.status() {
        BacktraceStatus::Captured => writeln!(text, "stack backtrace:\n{trace}"),
        _ => writeln!(text, "note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace"),
    };
    // If the writer threads have not started yet, write directly. The panicking thread may be the thread that was to start the writer
    // threads.
    if !UNSTARTED.try_lock().is_ok_and(|threads| threads.is_empty()) {
        let _ = io::stderr().write_all(text.as_bytes());
        return;
    }
    let Some(queue) = STANDARD_ERROR.get() else { return };
    if queue.push_lines(text.as_bytes()) {
        // If the reader of the stream reads nothing, this call waits only after the first panic.
        let _ = queue.drain_once(PANIC_MESSAGE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_lines_are_reported_as_a_warning() {
        let line = String::from_utf8(dropped(8)).unwrap();
        assert!(line.starts_with("[2") && line.contains("Z WARN ] 8 lines dropped: "), "{line}");
    }
}

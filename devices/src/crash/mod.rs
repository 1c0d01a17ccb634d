// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Crash report of the process: a file with the version, the thread, the cause and the last requests to devices. The report contains no
//! guest memory.
//!
//! The caller of [`leave_reports_in`] opens the file in advance, because the system call filter of a crashing thread may forbid opening
//! files.

pub(crate) mod bounded_write;
mod report;
mod requests;
mod ring_text;
mod rings;
mod signals;
mod thread_name;

use std::backtrace::Backtrace;
use std::fs::File;
use std::{io, panic};

pub(crate) use self::report::{role, set_role, write_report};
pub use self::requests::{Pending, REQUESTS, RequestRing};
pub(crate) use self::ring_text::{CONFIG_SPACE, READ, RingKind, WRITE};
pub(crate) use self::rings::{Claim, Number, Ring, Slot};

/// Returns the part of a crash report that lists the last requests to devices.
#[cfg(test)]
pub(crate) fn last_requests() -> String {
    let mut text = String::new();
    rings::ALL.write(&mut text).expect("there is room in a string");
    text
}

/// Makes failure signals, such as SIGSEGV, end the process even if another process sends them. By default, Rust's standard library mistakes
/// a sent SIGSEGV or SIGBUS for a fault that will repeat. The library then ignores the first signal, and the process continues. Call this
/// function before other threads start.
///
/// # Errors
/// The host's kernel rejects the handler.
pub fn watch_signals() -> io::Result<()> {
    signals::watch()
}

/// Makes the process write crash reports to `file`. Three events cause a report: a panic, a failure signal such as SIGSEGV, and a system
/// call that the thread's role does not allow. Call this function once, before other threads start.
///
/// # Errors
/// The process has a report file already, or the host's kernel rejects the handler.
pub fn leave_reports_in(file: File) -> io::Result<()> {
    report::set_file(file)?;
    let before = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        before(panic);
        let message = panic.payload_as_str().unwrap_or("a message that is not text");
        let trace = Backtrace::force_capture();
        match panic.location() {
            Some(place) => write_report(format_args!("panic at {place}: {message}"), format_args!("{trace:#}")),
            None => write_report(format_args!("panic: {message}"), format_args!("{trace:#}")),
        }
    }));
    signals::watch()
}

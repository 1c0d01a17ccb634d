// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a crash of the process leaves: a file that says which version, which thread, why, and which requests came last. Nothing of the
//! guest's memory is in it.
//!
//! The file is opened beforehand ([`leave_reports_in`]): a thread that crashes may not be allowed to.

pub(crate) mod patient_write;
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

/// What a report would say now of requests to devices.
#[cfg(test)]
pub(crate) fn last_requests() -> String {
    let mut text = String::new();
    rings::ALL.write(&mut text).expect("there is room in a string");
    text
}

/// Makes signals of failures end the process also where another process sends them. Without this, Rust's library takes the first SIGSEGV
/// or SIGBUS for a fault that comes again, and the process goes on. Call it before other threads start.
///
/// # Errors
/// The host's kernel takes no handler.
pub fn watch_signals() -> io::Result<()> {
    signals::watch()
}

/// Has reports of panics, of signals that end the process, and of calls that no role has, written to `file`. Call it once, before other
/// threads start.
///
/// # Errors
/// The process has such a file already, or the host's kernel takes no handler.
pub fn leave_reports_in(file: File) -> io::Result<()> {
    report::set_file(file)?;
    let before = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        before(panic);
        let message = panic.payload_as_str().unwrap_or("something that is no text");
        let trace = Backtrace::force_capture();
        match panic.location() {
            Some(place) => write_report(format_args!("panic at {place}: {message}"), format_args!("{trace:#}")),
            None => write_report(format_args!("panic: {message}"), format_args!("{trace:#}")),
        }
    }));
    signals::watch()
}

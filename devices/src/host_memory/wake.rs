// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Sends a signal to wake the thread that acts on notes.

use std::sync::atomic::{AtomicI32, Ordering};

use libc::c_int;

/// Signal that wakes the thread, or 0 before the thread exists.
static WAKE: AtomicI32 = AtomicI32::new(0);

pub(super) fn set_signal(signal: c_int) {
    WAKE.store(signal, Ordering::Relaxed);
}

/// Sends the signal to the calling thread. The signal's handler then wakes the thread that takes the notes.
pub(super) fn wake() {
    match WAKE.load(Ordering::Relaxed) {
        0 => {}
        signal => raise(signal),
    }
}

/// Sends `signal` to this thread.
pub(super) fn raise(signal: c_int) {
    // SAFETY: The call takes only a number, and is allowed in a signal handler.
    unsafe { libc::raise(signal) };
}

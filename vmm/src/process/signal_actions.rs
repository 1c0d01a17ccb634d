// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Signals that end the process by default and that Carom ignores. `control/signals.rs` handles the other signals.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;

use libc::{c_int, sigaction};

/// Ignored signals, in addition to the real-time signals. Because SIGXFSZ is ignored, a write beyond RLIMIT_FSIZE fails with EFBIG. Because
/// SIGPIPE is ignored, a write to a closed pipe fails with EPIPE. The other signals have no meaning for Carom.
const IGNORED: [c_int; 7] = [
    libc::SIGXFSZ,
    libc::SIGPIPE,
    libc::SIGUSR2,
    libc::SIGVTALRM,
    libc::SIGPROF,
    libc::SIGIO,
    // Linux itself never sends this signal.
    libc::SIGSTKFLT,
];

/// Ignores the signals of this module's list and all real-time signals. Unblocks all signals that the parent process blocked. Call this
/// function once, before other threads exist and before anything is written.
///
/// Keeps a handler that a preloaded library has set, such as a profiler's handler for SIGPROF.
///
/// # Errors
/// The kernel rejects the call.
pub fn prepare() -> io::Result<()> {
    for signal in IGNORED.into_iter().chain(libc::SIGRTMIN()..=libc::SIGRTMAX()) {
        let before = replace(signal, libc::SIG_IGN)?;
        if before.sa_sigaction != libc::SIG_DFL {
            restore(signal, &before)?;
        }
    }
    unblock_all()
}

/// True if the process ignores `signal`. For example, a program that `nohup` starts ignores SIGHUP.
pub fn is_ignored(signal: c_int) -> bool {
    // SAFETY: Zeros are a valid action.
    let mut action: sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    // SAFETY: The new action is null, so the action stays. The kernel writes the current action to `action`.
    let status = unsafe { sigaction(signal, ptr::null(), &mut action) };
    status == 0 && action.sa_sigaction == libc::SIG_IGN
}

/// Sets `handler`, which is SIG_IGN or SIG_DFL, and returns the previous action.
fn replace(signal: c_int, handler: libc::sighandler_t) -> io::Result<sigaction> {
    // SAFETY: Zeros are a valid action.
    let mut action: sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    action.sa_sigaction = handler;
    let mut before = action;
    // SAFETY: The new action runs no code of this process. The kernel writes the old action.
    let status = unsafe { sigaction(signal, &action, &mut before) };
    if status == 0 { Ok(before) } else { Err(io::Error::last_os_error()) }
}

fn restore(signal: c_int, action: &sigaction) -> io::Result<()> {
    // SAFETY: The kernel returned this action just now, so its handler is still loaded.
    let status = unsafe { sigaction(signal, action, ptr::null_mut()) };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn unblock_all() -> io::Result<()> {
    // SAFETY: Zeros are a valid set of signals. With Linux' C libraries, this set is empty.
    let none: libc::sigset_t = unsafe { MaybeUninit::zeroed().assume_init() };
    // SAFETY: The set is only read, and the old set is not written anywhere.
    let error = unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &none, ptr::null_mut()) };
    if error == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_ignored_is_true_only_for_ignored_signals() {
        // Rust's runtime ignores SIGPIPE. No test changes SIGTSTP.
        assert!(is_ignored(libc::SIGPIPE));
        assert!(!is_ignored(libc::SIGTSTP));
        assert!(!is_ignored(-1));
    }
}

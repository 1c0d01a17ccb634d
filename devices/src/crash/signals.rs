// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Handler of signals that end the process after a failure, such as SIGSEGV and SIGABRT.

use std::cell::Cell;
use std::io;
use std::mem::MaybeUninit;
use std::sync::OnceLock;

use libc::{c_int, c_void, sigaction, siginfo_t, ucontext_t};

use super::report::write_report;

/// Signals that report a failure of the program, and their names. SIGSYS is not in the list, because `sandbox/trap.rs` handles it.
const FATAL: [(c_int, &str); 5] = [
    (libc::SIGSEGV, "SIGSEGV"),
    (libc::SIGBUS, "SIGBUS"),
    (libc::SIGILL, "SIGILL"),
    (libc::SIGFPE, "SIGFPE"),
    (libc::SIGABRT, "SIGABRT"),
];

/// Actions of the signals in `FATAL` before [`watch`] replaced the actions. Rust's standard library registers some of these actions to
/// report stack overflows.
static BEFORE: OnceLock<[sigaction; FATAL.len()]> = OnceLock::new();

thread_local! {
    /// True if a fault of this thread was reported. The variable needs no allocation and no destructor, so a signal handler may use it.
    static FAULTED: Cell<bool> = const { Cell::new(false) };
}

/// Makes each of the signals in `FATAL` write a report. After the report of a fault, the signal's earlier action follows. After the report
/// of a sent signal, the default action follows. A second call changes nothing.
pub(super) fn watch() -> io::Result<()> {
    if BEFORE.get().is_some() {
        return Ok(());
    }
    let mut before = [MaybeUninit::<sigaction>::zeroed(); FATAL.len()];
    for ((signal, _), before) in FATAL.iter().zip(&mut before) {
        // SAFETY: No new action is given. The old action is written to `before`, which has room for it.
        let got = unsafe { sigaction(*signal, std::ptr::null(), before.as_mut_ptr()) };
        if got != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    // SAFETY: The loop above has written each element.
    let before = before.map(|before| unsafe { before.assume_init() });
    BEFORE.set(before).map_err(|_| io::Error::other("the handlers for failure signals are installed already"))?;
    for (signal, _) in FATAL {
        // SAFETY: Zeros are a valid action.
        let mut action: sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
        action.sa_sigaction = failed as *const () as usize;
        // Use the stack that Rust's library gives each thread for signals, because the thread's own stack may be full.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: The handler has the signature that SA_SIGINFO requires, and does only what a signal handler may do.
        let set = unsafe { sigaction(signal, &action, std::ptr::null_mut()) };
        if set != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Handles a signal as [`watch`] describes.
extern "C" fn failed(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: The kernel passes both pointers to a handler registered with SA_SIGINFO. They are valid until the handler returns.
    let info = unsafe { &*info };
    let code = info.si_code;
    // SAFETY: The field exists for each of these signals. If the signal reports no fault, the field holds an arbitrary number.
    let address = unsafe { info.si_addr() } as usize;
    // SAFETY: The kernel passes a valid pointer, as above.
    let registers = unsafe { &(*context.cast::<ucontext_t>()).uc_mcontext.gregs };
    let register =
        |which: c_int| usize::try_from(which).ok().and_then(|at| registers.get(at)).copied().unwrap_or_default();
    let (ip, sp) = (register(libc::REG_RIP), register(libc::REG_RSP));
    let place = FATAL.iter().position(|(known, _)| *known == signal);
    let name = place.map_or("a signal", |place| FATAL[place].1);
    // The code is positive if the kernel reports a fault. Otherwise a process sent the signal.
    let faults = code > 0;
    if faults {
        FAULTED.set(true);
        write_report(
            format_args!("{name} (code {code}) at address {address:#x}"),
            format_args!("instruction {ip:#x}, stack {sp:#x}"),
        );
    } else if !FAULTED.get() {
        // Report the signal only if no fault was reported before. After a stack overflow, Rust's library raises SIGABRT for a fault that
        // was reported already.
        write_report(format_args!("{name}, which a process sent"), format_args!("instruction {ip:#x}, stack {sp:#x}"));
    }
    if faults && let (Some(before), Some(place)) = (BEFORE.get(), place) {
        // Restore the earlier action. When this handler returns, the fault repeats and causes the earlier action.
        // SAFETY: The kernel returned this action before.
        unsafe { sigaction(signal, &before[place], std::ptr::null_mut()) };
        return;
    }
    // SAFETY: The default action runs no code of the process.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
    // SAFETY: The call takes only a number. The signal stays pending until this handler returns.
    unsafe { libc::raise(signal) };
}

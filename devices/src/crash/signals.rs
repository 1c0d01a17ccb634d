// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Signals by which the host's kernel, or the process itself, ends the process for a failure.

use std::cell::Cell;
use std::io;
use std::mem::MaybeUninit;
use std::sync::OnceLock;

use libc::{c_int, c_void, sigaction, siginfo_t, ucontext_t};

use super::report::write_report;

/// Signals that a failure of the program brings, and their names. SIGSYS is `sandbox/trap.rs`'.
const FATAL: [(c_int, &str); 5] = [
    (libc::SIGSEGV, "SIGSEGV"),
    (libc::SIGBUS, "SIGBUS"),
    (libc::SIGILL, "SIGILL"),
    (libc::SIGFPE, "SIGFPE"),
    (libc::SIGABRT, "SIGABRT"),
];

/// What was done with each of them before: Rust's library tells of stacks that overflow.
static BEFORE: OnceLock<[sigaction; FATAL.len()]> = OnceLock::new();

thread_local! {
    /// Whether this thread's fault was reported. It takes no allocation and no destructor, so that a handler of signals may use it.
    static FAULTED: Cell<bool> = const { Cell::new(false) };
}

/// Writes a report when one of them comes. The signal then does what it did before. A second call changes nothing.
pub(super) fn watch() -> io::Result<()> {
    if BEFORE.get().is_some() {
        return Ok(());
    }
    let mut before = [MaybeUninit::<sigaction>::zeroed(); FATAL.len()];
    for ((signal, _), before) in FATAL.iter().zip(&mut before) {
        // SAFETY: No new action is given; the old one is written to where there is room for it.
        let got = unsafe { sigaction(*signal, std::ptr::null(), before.as_mut_ptr()) };
        if got != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    // SAFETY: Each was written above.
    let before = before.map(|before| unsafe { before.assume_init() });
    BEFORE.set(before).map_err(|_| io::Error::other("these signals are watched already"))?;
    for (signal, _) in FATAL {
        // SAFETY: Zeros are a valid action.
        let mut action: sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
        action.sa_sigaction = failed as *const () as usize;
        // On the stack that Rust's library gives each thread for it: the thread's own may be full.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: The handler has the form that SA_SIGINFO asks for, and does only what one may.
        let set = unsafe { sigaction(signal, &action, std::ptr::null_mut()) };
        if set != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Writes the report, and lets the signal do what it did before.
extern "C" fn failed(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: The kernel hands both to a handler that was registered with SA_SIGINFO; they last until it returns.
    let info = unsafe { &*info };
    let code = info.si_code;
    // SAFETY: The field is there for each of these signals. For those that are no faults it is some number.
    let address = unsafe { info.si_addr() } as usize;
    // SAFETY: As above.
    let registers = unsafe { &(*context.cast::<ucontext_t>()).uc_mcontext.gregs };
    let register =
        |which: c_int| usize::try_from(which).ok().and_then(|at| registers.get(at)).copied().unwrap_or_default();
    let (ip, sp) = (register(libc::REG_RIP), register(libc::REG_RSP));
    let place = FATAL.iter().position(|(known, _)| *known == signal);
    let name = place.map_or("a signal", |place| FATAL[place].1);
    // Positive where the kernel tells of a fault, otherwise somebody sent it.
    let faults = code > 0;
    if faults {
        FAULTED.set(true);
        write_report(
            format_args!("{name} (code {code}) at address {address:#x}"),
            format_args!("instruction {ip:#x}, stack {sp:#x}"),
        );
    } else if !FAULTED.get() {
        // Rust's library answers a stack that overflows with SIGABRT.
        write_report(format_args!("{name}, which was sent"), format_args!("instruction {ip:#x}, stack {sp:#x}"));
    }
    if faults && let (Some(before), Some(place)) = (BEFORE.get(), place) {
        // The fault comes again when this returns.
        // SAFETY: It is what the kernel had told.
        unsafe { sigaction(signal, &before[place], std::ptr::null_mut()) };
        return;
    }
    // SAFETY: The default action runs nothing of the process.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
    // SAFETY: It takes nothing but a number. The signal waits until this returns.
    unsafe { libc::raise(signal) };
}

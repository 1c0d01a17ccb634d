// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! SIGBUS: the kernel's signal that a page of a mapping is lost.
//!
//! Devices access guest memory by copies in many places, and these copies cannot return an error. So a thread that touches a lost page of
//! guest memory never returns from the handler. Otherwise the thread would continue with bytes that the guest never wrote. The handler
//! leaves a note with `is_stuck`. The thread that takes this note ends the process, and reports the reason.
//!
//! In two cases, SIGBUS reports a lost page that the thread itself does not access. In these cases the handler returns:
//!
//! - a memory error in a page that no thread has read yet (`BUS_MCEERR_AO`)
//! - a memory error that the kernel found during a system call of the thread, such as `KVM_RUN`

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

use libc::{c_int, c_void, sigaction, siginfo_t, ucontext_t};

use super::loss::Cause;
use super::notes;
use super::regions::{TEXT_BYTES, find_in_signal};
use super::wake;
use crate::crash::write_report;

/// Codes of SIGBUS (`asm-generic/siginfo.h`). `BUS_ADRERR` reports a missing page. `BUS_MCEERR_AR` reports a memory error in an accessed
/// page (action required). `BUS_MCEERR_AO` reports a memory error that no access has hit (action optional).
const BUS_ADRERR: c_int = 2;
const BUS_MCEERR_AR: c_int = 4;
const BUS_MCEERR_AO: c_int = 5;

/// Machine code of the `syscall` instruction.
const SYSCALL: [u8; 2] = [0x0f, 0x05];

/// Action of SIGBUS before [`watch`] replaced the action.
static BEFORE: OnceLock<sigaction> = OnceLock::new();

/// Handles SIGBUS for guest memory from now on. A thread that has left a note then sends the signal `signal_to_wake` to itself. If SIGBUS
/// has another cause, the handler performs the earlier action.
///
/// # Errors
/// `watch` was called before, or the kernel rejects the handler.
pub fn watch(signal_to_wake: i32) -> io::Result<()> {
    let mut before = MaybeUninit::<sigaction>::zeroed();
    // SAFETY: No new action is given. The old action is written to `before`, which has room for it.
    if unsafe { sigaction(libc::SIGBUS, ptr::null(), before.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: The call above has written the action.
    let before = unsafe { before.assume_init() };
    BEFORE.set(before).map_err(|_| io::Error::other("the handler for SIGBUS is installed already"))?;
    wake::set_signal(signal_to_wake);
    // SAFETY: Zeros are a valid action.
    let mut action: sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    action.sa_sigaction = on_sigbus as *const () as usize;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: The handler has the signature that SA_SIGINFO requires, and does only what a signal handler may do.
    if unsafe { sigaction(libc::SIGBUS, &action, ptr::null_mut()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

extern "C" fn on_sigbus(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: The C library has an errno for each thread, which lives as long as the thread.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: As above.
    let kept = unsafe { *errno };
    // SAFETY: The kernel passes the pointer to a handler registered with SA_SIGINFO. It is valid until the handler returns.
    let info = unsafe { &*info };
    // SAFETY: The field exists for SIGBUS. If a process sent the signal, the field holds an arbitrary number, which is not used.
    let address = unsafe { info.si_addr() }.addr();
    let cause = match info.si_code {
        BUS_ADRERR => Some(Cause::Missing),
        BUS_MCEERR_AR | BUS_MCEERR_AO => Some(Cause::Poisoned),
        _ => None,
    };
    let mut text = [0; TEXT_BYTES];
    match cause.zip(find_in_signal(address, &mut text)) {
        Some((cause, (len, offset))) => {
            // SAFETY: The kernel also passes a valid pointer to the context.
            let registers = unsafe { &(*context.cast::<ucontext_t>()).uc_mcontext.gregs };
            let at = usize::try_from(libc::REG_RIP).unwrap_or_default();
            let instruction = registers.get(at).map_or(0, |register| register.cast_unsigned());
            let is_of_kernel = match info.si_code {
                BUS_MCEERR_AO => true,
                BUS_MCEERR_AR => is_behind_syscall(instruction),
                _ => false,
            };
            if is_of_kernel {
                notes::leave(address, cause, false);
            } else {
                let name = str::from_utf8(&text[..len]).unwrap_or("guest memory");
                write_report(
                    format_args!("lost guest memory: {name}, offset {offset:#x} (SIGBUS, code {})", info.si_code),
                    format_args!("instruction {instruction:#x}"),
                );
                notes::leave(address, cause, true);
                loop {
                    // Sleep in a loop, because signals end a sleep early.
                    thread::sleep(Duration::from_secs(3600));
                }
            }
        }
        None => pass_on(signal, info.si_code),
    }
    // SAFETY: As above.
    unsafe { *errno = kept };
}

/// True if `instruction` is directly after a `syscall` instruction. In this case the kernel found the error during the system call.
fn is_behind_syscall(instruction: u64) -> bool {
    let Ok(end) = usize::try_from(instruction) else { return false };
    // If `end` is at the start of a page, do not read the bytes before `end`, because the previous page may be unmapped or hold no code.
    if end & 4095 < SYSCALL.len() {
        return false;
    }
    let code: *const [u8; 2] = ptr::with_exposed_provenance(end - SYSCALL.len());
    // SAFETY: The processor was about to execute the byte at `end`. The bytes before `end` are in the same page of code. On x86, code is
    // readable.
    unsafe { code.read() == SYSCALL }
}

/// Performs the action that the signal would have had without this handler.
fn pass_on(signal: c_int, code: c_int) {
    if let Some(before) = BEFORE.get() {
        // SAFETY: The kernel returned this action before.
        unsafe { sigaction(signal, before, ptr::null_mut()) };
    }
    // A fault repeats when the handler returns. A sent signal, or an early report of a memory error, does not repeat, so raise the signal
    // again.
    if code <= 0 || code == BUS_MCEERR_AO {
        wake::raise(signal);
    }
}

/// Sends SIGBUS to this thread, with a code that normally only the kernel sends.
#[cfg(test)]
pub(super) fn send_to_self(code: c_int, address: usize) {
    // SAFETY: Zeros are valid information about a signal.
    let mut info: siginfo_t = unsafe { MaybeUninit::zeroed().assume_init() };
    (info.si_signo, info.si_code) = (libc::SIGBUS, code);
    let at = ptr::from_mut(&mut info).cast::<usize>().wrapping_add(2);
    // SAFETY: `at` points to the address field of `info`, which follows three numbers and padding. The field is within the 128 bytes of
    // `info`.
    unsafe { at.write(address) };
    let process = libc::pid_t::try_from(std::process::id()).expect("a process ID is a pid_t");
    // SAFETY: The call takes no arguments.
    let thread = unsafe { libc::gettid() };
    // SAFETY: The information outlives the call, which only reads it.
    let sent = unsafe { libc::syscall(libc::SYS_rt_tgsigqueueinfo, process, thread, libc::SIGBUS, &info) };
    assert_eq!(sent, 0, "{}", io::Error::last_os_error());
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Ends the process after a thread made a call that its role does not allow.

use std::io::{self, Write};

use libc::{c_int, c_void, siginfo_t, ucontext_t};
use vmm_sys_util::signal::register_signal_handler;

use super::call_name::CallName;
use crate::crash::{self, bounded_write};

/// Exit status of the process, the same as for any failure.
const STATUS: c_int = 1;
/// `si_code` of a signal that a seccomp filter caused.
const SYS_SECCOMP: c_int = 1;

/// Registers a handler that ends the process with a message when a filter stops a call.
pub(super) fn watch() -> io::Result<()> {
    register_signal_handler(libc::SIGSYS, stopped).map_err(|error| io::Error::from_raw_os_error(error.errno()))
}

/// Formats a line in a buffer on the stack, writes the line to standard error, and ends the process. Does only what a signal handler may
/// do.
extern "C" fn stopped(_: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: The kernel passes both pointers to a handler registered with SA_SIGINFO. They are valid until the handler returns.
    let by_filter = unsafe { (*info).si_code } == SYS_SECCOMP;
    // SAFETY: As above. For this signal, the registers contain the values from the time of the system call. RAX contains the number of the
    // call.
    let registers = unsafe { &(*context.cast::<ucontext_t>()).uc_mcontext.gregs };
    let register = |which: c_int| usize::try_from(which).ok().and_then(|at| registers.get(at)).copied().unwrap_or(-1);
    let (number, second) = (register(libc::REG_RAX), register(libc::REG_RSI));
    let call = CallName(number);
    let mut line = [0; 256];
    let mut rest = &mut line[..];
    // The write fails if the line is full. The message is then truncated.
    let _ = if by_filter {
        write!(rest, "carom: a thread of role '{}' made system call {call}", crash::role())
    } else {
        write!(rest, "carom: SIGSYS was sent to this process, but not by its system call filter")
    };
    if by_filter && number == libc::SYS_ioctl {
        let _ = write!(rest, " (ioctl {second:#x})");
    }
    let _ = writeln!(rest, "{}", if by_filter { ", which its role does not allow (--seccomp)" } else { "" });
    let left = rest.len();
    let mut steps = bounded_write::STEPS;
    bounded_write::write(&rustix::stdio::stderr(), &line[..line.len() - left], &mut steps);
    if by_filter {
        crash::write_report(
            format_args!(
                "system call {call} with second argument {second:#x}, which the thread's role does not allow (--seccomp)"
            ),
            format_args!("instruction {:#x}", register(libc::REG_RIP)),
        );
    }
    // SAFETY: `_exit` ends the process immediately, and runs no more code of the process.
    unsafe { libc::_exit(STATUS) }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The end of a process of which a thread made a call that its role does not have.

use std::io::{self, Write};

use libc::{c_int, c_void, siginfo_t, ucontext_t};
use vmm_sys_util::signal::register_signal_handler;

use super::call_name::CallName;
use crate::crash::{self, patient_write};

/// Status of a process that ended so, as that of any failure.
const STATUS: c_int = 1;
/// `si_code` of the signal, where it is a filter's.
const SYS_SECCOMP: c_int = 1;

/// Has the process end with a message when a filter stops a call.
pub(super) fn watch() -> io::Result<()> {
    register_signal_handler(libc::SIGSYS, stopped).map_err(|error| io::Error::from_raw_os_error(error.errno()))
}

/// Only what a handler of signals may do: it writes a line from the stack, and ends the process.
extern "C" fn stopped(_: c_int, info: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: The kernel hands both to a handler that was registered with SA_SIGINFO; they last until it returns.
    let by_filter = unsafe { (*info).si_code } == SYS_SECCOMP;
    // SAFETY: As above. For this signal the registers are those of the call, its number in RAX.
    let registers = unsafe { &(*context.cast::<ucontext_t>()).uc_mcontext.gregs };
    let register = |which: c_int| usize::try_from(which).ok().and_then(|at| registers.get(at)).copied().unwrap_or(-1);
    let (number, second) = (register(libc::REG_RAX), register(libc::REG_RSI));
    let call = CallName(number);
    let mut line = [0; 256];
    let mut rest = &mut line[..];
    // They fail where the line is full: then it ends there.
    let _ = if by_filter {
        write!(rest, "carom: a thread of role '{}' made system call {call}", crash::role())
    } else {
        write!(rest, "carom: signal SIGSYS came from outside")
    };
    if by_filter && number == libc::SYS_ioctl {
        let _ = write!(rest, " (ioctl {second:#x})");
    }
    let _ = writeln!(rest, "{}", if by_filter { ", which it has no need of (--seccomp)" } else { "" });
    let left = rest.len();
    let mut steps = patient_write::STEPS;
    patient_write::write(&rustix::stdio::stderr(), &line[..line.len() - left], &mut steps);
    if by_filter {
        crash::write_report(
            format_args!(
                "system call {call} with {second:#x} second, which the thread's role does not have (--seccomp)"
            ),
            format_args!("instruction {:#x}", register(libc::REG_RIP)),
        );
    }
    // SAFETY: It ends the process at once and runs nothing of it.
    unsafe { libc::_exit(STATUS) }
}

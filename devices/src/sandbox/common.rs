// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Calls that every thread may make, so that no role needs to list them. Logging and all common versions of the C and Rust libraries need
//! these calls.

use super::call::Argument::{Bits, Is, Null};
use super::call::Call::{self, Any, Ioctl, OnItself, Where, With, Without};
use super::calls::fcntl;

/// `futex_wake`, `futex_wait` and `futex_requeue` of Linux 6.7, which newer C libraries use.
const FUTEX_WAKE: i64 = 454;
const FUTEX_WAIT: i64 = 455;
const FUTEX_REQUEUE: i64 = 456;
/// `PR_SET_VMA`. The C library may use this option to name memory.
const NAME_MEMORY: u32 = 0x5356_4d41;
/// Memory protection that a filtered thread cannot request, because the thread must not create executable memory.
const EXEC: u32 = libc::PROT_EXEC.cast_unsigned();

/// `F_SETFL` without `O_ASYNC`. With `O_ASYNC`, the kernel would send signals.
const SET_FLAGS: Call =
    Where(libc::SYS_fcntl, &[Is(1, libc::F_SETFL.cast_unsigned()), Bits(2, libc::O_ASYNC.cast_unsigned(), 0)]);

const fn advice(advice: i32) -> Call {
    With(libc::SYS_madvise, 2, advice.cast_unsigned())
}

/// `MADV_GUARD_INSTALL` and `MADV_GUARD_REMOVE` of Linux 6.13. Newer C libraries use this advice for the guard pages of stacks.
const GUARD: i32 = 102;
const UNGUARD: i32 = 103;

/// Calls that every thread may make.
pub const COMMON: &[Call] = &[
    // Calls for the synchronisation of threads, and for time.
    Any(libc::SYS_futex),
    Any(libc::SYS_futex_waitv),
    Any(FUTEX_WAKE),
    Any(FUTEX_WAIT),
    Any(FUTEX_REQUEUE),
    Any(libc::SYS_sched_yield),
    Any(libc::SYS_clock_gettime),
    Any(libc::SYS_clock_getres),
    Any(libc::SYS_clock_nanosleep),
    Any(libc::SYS_nanosleep),
    Any(libc::SYS_gettimeofday),
    Any(libc::SYS_time),
    Any(libc::SYS_restart_syscall),
    // Calls that allocate memory, and calls that advise the kernel about the use of memory.
    Without(libc::SYS_mmap, 2, EXEC),
    Without(libc::SYS_mprotect, 2, EXEC),
    Any(libc::SYS_munmap),
    Any(libc::SYS_mremap),
    advice(libc::MADV_DONTNEED),
    advice(libc::MADV_FREE),
    advice(libc::MADV_REMOVE),
    advice(libc::MADV_DONTFORK),
    advice(libc::MADV_MERGEABLE),
    advice(libc::MADV_HUGEPAGE),
    advice(libc::MADV_NOHUGEPAGE),
    advice(libc::MADV_DONTDUMP),
    advice(libc::MADV_POPULATE_READ),
    advice(libc::MADV_POPULATE_WRITE),
    advice(libc::MADV_COLLAPSE),
    advice(GUARD),
    advice(UNGUARD),
    Any(libc::SYS_brk),
    With(libc::SYS_prctl, 0, NAME_MEMORY),
    // Calls on open files, such as events and the log.
    Any(libc::SYS_read),
    Any(libc::SYS_write),
    Any(libc::SYS_readv),
    Any(libc::SYS_writev),
    Any(libc::SYS_lseek),
    Any(libc::SYS_close),
    Any(libc::SYS_fstat),
    Any(libc::SYS_poll),
    Any(libc::SYS_ppoll),
    Any(libc::SYS_dup),
    Any(libc::SYS_eventfd2),
    fcntl(libc::F_GETFD),
    fcntl(libc::F_SETFD),
    fcntl(libc::F_GETFL),
    SET_FLAGS,
    fcntl(libc::F_DUPFD_CLOEXEC),
    // Terminal settings, which a panicking thread restores: `TCGETS`, `TCSETS` to `TCSETSF`, and their variants for any speed.
    Ioctl(0x5401),
    Ioctl(0x5402),
    Ioctl(0x5403),
    Ioctl(0x5404),
    Ioctl(0x802c_542a),
    Ioctl(0x402c_542b),
    Ioctl(0x402c_542c),
    Ioctl(0x402c_542d),
    // Calls for the start, the end and the signals of the thread itself.
    Any(libc::SYS_sigaltstack),
    Any(libc::SYS_set_robust_list),
    Any(libc::SYS_rseq),
    Any(libc::SYS_getpid),
    Any(libc::SYS_gettid),
    Any(libc::SYS_sched_getaffinity),
    Any(libc::SYS_getrandom),
    Any(libc::SYS_rt_sigaction),
    Any(libc::SYS_rt_sigprocmask),
    Any(libc::SYS_rt_sigreturn),
    OnItself(libc::SYS_tgkill),
    // A signal handler can run on any thread. The handler sends a byte on a socket to notify the thread that handles signals.
    Where(libc::SYS_sendto, &[Null(4)]),
    With(libc::SYS_prctl, 0, libc::PR_SET_NAME.cast_unsigned()),
    // A crash report reads the thread's name.
    With(libc::SYS_prctl, 0, libc::PR_GET_NAME.cast_unsigned()),
    Any(libc::SYS_exit),
    Any(libc::SYS_exit_group),
];

/// Calls that libraries make even in a thread that opens no files. The C library reads a kernel setting when it frees memory, and a panic
/// backtrace reads symbols. The libraries work without these calls, so the calls fail with `EACCES` and do not end the process.
pub const REFUSED: &[i64] = &[
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_access,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_readlink,
    libc::SYS_readlinkat,
    libc::SYS_getcwd,
];

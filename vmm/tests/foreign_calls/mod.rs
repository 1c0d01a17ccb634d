// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! System calls that access another process, files or sockets that no thread needs, or the whole host. No thread role allows these calls,
//! with one exception: the thread that starts the other threads may call `ioctl`.
//!
//! If a filter allows such a call by mistake, the call does no harm. Its pointers are null, its descriptor is invalid and its signal is 0.
//! Only a call that creates a socket has an effect: the socket stays open.

use std::io;

use libc::{c_int, c_long, pid_t};

/// System call with arguments that no thread needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ForeignCall {
    /// Description for messages.
    pub(crate) what: &'static str,
    /// Number of the call.
    pub(crate) number: c_long,
    arguments: [c_long; 6],
}

/// Invalid descriptor.
const NO_FILE: c_int = -1;
/// Constants for arguments that the `libc` crate does not define.
const PR_SET_PTRACER: c_int = 0x5961_6d61;
const MADV_HWPOISON: c_int = 100;
const MADV_SOFT_OFFLINE: c_int = 101;
/// `ioctl` requests: `FIOASYNC`, `FIOSETOWN`, `SIOCSPGRP`, `TIOCSTI`, `SIOCADDRT`, `BLKRRPART`, `BLKDISCARD`.
const REQUESTS: [(&str, c_int); 7] = [
    ("ioctl FIOASYNC", 0x5452),
    ("ioctl FIOSETOWN", 0x8901),
    ("ioctl SIOCSPGRP", 0x8902),
    ("ioctl TIOCSTI", 0x5412),
    ("ioctl SIOCADDRT", 0x890b),
    ("ioctl BLKRRPART", 0x125f),
    ("ioctl BLKDISCARD", 0x1277),
];

impl ForeignCall {
    fn new<const N: usize>(what: &'static str, number: c_long, arguments: [c_int; N]) -> Self {
        let mut all = [0; 6];
        for (all, argument) in all.iter_mut().zip(arguments) {
            *all = c_long::from(argument);
        }
        Self { what, number, arguments: all }
    }

    /// Makes the call.
    pub(crate) fn make(&self) -> io::Result<()> {
        let [a, b, c, d, e, f] = self.arguments;
        // SAFETY: All pointers are null or outside the process, so the kernel neither reads nor writes memory of this process. No call
        // of `all` changes a mapping.
        match unsafe { libc::syscall(self.number, a, b, c, d, e, f) } {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        }
    }

    /// True if the thread that starts the other threads may make the call, because that thread may use `ioctl` with any arguments.
    pub(crate) fn is_for_starter(&self) -> bool {
        self.number == libc::SYS_ioctl
    }
}

/// Returns all foreign calls. `other` is another process, which the caller started.
pub(crate) fn all(other: pid_t) -> Vec<ForeignCall> {
    let call = |what, number, arguments: [c_int; 3]| ForeignCall::new(what, number, arguments);
    let limit = libc::RLIMIT_NOFILE.cast_signed();
    let own = std::process::id().cast_signed();
    let stream = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
    let datagram = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC;
    let mut all = vec![
        // Calls that access other processes.
        call("kill another", libc::SYS_kill, [other, 0, 0]),
        call("kill a group", libc::SYS_kill, [-other, 0, 0]),
        call("kill all", libc::SYS_kill, [-1, 0, 0]),
        call("tgkill another", libc::SYS_tgkill, [other, other, 0]),
        call("tkill", libc::SYS_tkill, [other, 0, 0]),
        call("rt_sigqueueinfo", libc::SYS_rt_sigqueueinfo, [other, 0, 0]),
        call("rt_tgsigqueueinfo", libc::SYS_rt_tgsigqueueinfo, [other, other, 0]),
        call("pidfd_open", libc::SYS_pidfd_open, [other, -1, 0]),
        call("pidfd_send_signal", libc::SYS_pidfd_send_signal, [NO_FILE, 0, 0]),
        call("pidfd_getfd", libc::SYS_pidfd_getfd, [NO_FILE, 0, 0]),
        ForeignCall::new("prlimit64 of another", libc::SYS_prlimit64, [other, limit, 0, 0]),
        ForeignCall::new("prlimit64, to be set", libc::SYS_prlimit64, [0, limit, -1, 0]),
        call("sched_setscheduler of another", libc::SYS_sched_setscheduler, [other, 0, 0]),
        call("sched_getscheduler of another", libc::SYS_sched_getscheduler, [other, 0, 0]),
        call("sched_setattr of another", libc::SYS_sched_setattr, [other, 0, 0]),
        ForeignCall::new("sched_getattr of another", libc::SYS_sched_getattr, [other, 0, 0, 0]),
        call("sched_setparam of another", libc::SYS_sched_setparam, [other, 0, 0]),
        call("sched_setaffinity of another", libc::SYS_sched_setaffinity, [other, 0, 0]),
        call("setpriority of another", libc::SYS_setpriority, [-1, other, 0]),
        call("ioprio_set of another", libc::SYS_ioprio_set, [1, other, -1]),
        call("ptrace", libc::SYS_ptrace, [-1, other, 0]),
        ForeignCall::new("process_vm_readv", libc::SYS_process_vm_readv, [other, 0, 0, 0, 0, 0]),
        ForeignCall::new("process_vm_writev", libc::SYS_process_vm_writev, [other, 0, 0, 0, 0, 0]),
        ForeignCall::new("process_madvise", libc::SYS_process_madvise, [NO_FILE, 0, 0, 0, 0]),
        call("process_mrelease", libc::SYS_process_mrelease, [NO_FILE, -1, 0]),
        ForeignCall::new("kcmp", libc::SYS_kcmp, [own, other, -1, 0, 0]),
        ForeignCall::new("migrate_pages of another", libc::SYS_migrate_pages, [other, 0, 0, 0]),
        ForeignCall::new("move_pages of another", libc::SYS_move_pages, [other, 0, 0, 0, 0, -1]),
        ForeignCall::new("prctl PR_SET_PTRACER", libc::SYS_prctl, [PR_SET_PTRACER, -2, 0, 0, 0]),
        // Commands of `fcntl`, and other calls with arguments that no thread needs.
        call("fcntl F_SETOWN", libc::SYS_fcntl, [NO_FILE, libc::F_SETOWN, other]),
        call("fcntl F_SETOWN_EX", libc::SYS_fcntl, [NO_FILE, 15, 0]),
        call("fcntl F_SETSIG", libc::SYS_fcntl, [NO_FILE, 10, libc::SIGKILL]),
        call("fcntl F_SETFL O_ASYNC", libc::SYS_fcntl, [NO_FILE, libc::F_SETFL, libc::O_ASYNC]),
        call("fcntl F_SETLEASE", libc::SYS_fcntl, [NO_FILE, libc::F_SETLEASE, libc::F_RDLCK]),
        call("fcntl F_NOTIFY", libc::SYS_fcntl, [NO_FILE, libc::F_NOTIFY, 0]),
        call("fcntl F_SETPIPE_SZ", libc::SYS_fcntl, [NO_FILE, libc::F_SETPIPE_SZ, 0]),
        call("fcntl F_SETLK", libc::SYS_fcntl, [NO_FILE, libc::F_SETLK, 0]),
        call("madvise MADV_HWPOISON", libc::SYS_madvise, [0, 0, MADV_HWPOISON]),
        call("madvise MADV_SOFT_OFFLINE", libc::SYS_madvise, [0, 0, MADV_SOFT_OFFLINE]),
        ForeignCall::new("mbind with pages of others", libc::SYS_mbind, [0, 0, -1, 0, 0, 4]),
        ForeignCall::new("setsockopt", libc::SYS_setsockopt, [NO_FILE, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, 0, 0]),
        call("timerfd_create of a clock that wakes the host", libc::SYS_timerfd_create, [9, -1, 0]),
        // Sockets of families, types and protocols that no thread needs.
        call("socket, TCP", libc::SYS_socket, [libc::AF_INET, stream, 0]),
        call("socket, TCP over IPv6", libc::SYS_socket, [libc::AF_INET6, stream, 0]),
        call("socket, raw", libc::SYS_socket, [libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_ICMP]),
        call("socket, ICMP", libc::SYS_socket, [libc::AF_INET, datagram, libc::IPPROTO_ICMP]),
        call("socket, netlink", libc::SYS_socket, [libc::AF_NETLINK, libc::SOCK_RAW, 0]),
        call("socket, packets", libc::SYS_socket, [libc::AF_PACKET, libc::SOCK_RAW, 0]),
        call("socket, vsock", libc::SYS_socket, [libc::AF_VSOCK, stream, 0]),
        call("socket, ciphers of the kernel", libc::SYS_socket, [libc::AF_ALG, libc::SOCK_SEQPACKET, 0]),
        call("socket, Unix datagrams", libc::SYS_socket, [libc::AF_UNIX, datagram, 0]),
        ForeignCall::new("socketpair, Unix datagrams", libc::SYS_socketpair, [libc::AF_UNIX, datagram, 0, 0]),
        // Calls that affect the whole host.
        call("execve", libc::SYS_execve, [0, 0, 0]),
        ForeignCall::new("mount", libc::SYS_mount, [0, 0, 0, 0, 0]),
        call("unshare", libc::SYS_unshare, [0, 0, 0]),
        call("setns", libc::SYS_setns, [NO_FILE, 0, 0]),
        call("setresuid", libc::SYS_setresuid, [-1, -1, -1]),
        call("capset", libc::SYS_capset, [0, 0, 0]),
        call("init_module", libc::SYS_init_module, [0, 0, 0]),
        call("bpf", libc::SYS_bpf, [-1, 0, 0]),
        ForeignCall::new("perf_event_open", libc::SYS_perf_event_open, [0, other, -1, -1, 0]),
        ForeignCall::new("keyctl", libc::SYS_keyctl, [-1, 0, 0, 0, 0]),
        ForeignCall::new("mmap of code", libc::SYS_mmap, [0, 0, libc::PROT_EXEC, 0, NO_FILE, 0]),
        call("mprotect of code", libc::SYS_mprotect, [0, 0, libc::PROT_EXEC]),
    ];
    all.extend(REQUESTS.map(|(what, request)| call(what, libc::SYS_ioctl, [NO_FILE, request, 0])));
    all
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Groups of system calls that roles refer to.

use super::call::Argument::{self, Bits, Is, Null};
use super::call::Call::{self, Any, Ioctl, IoctlsOf, Where, With};

/// Type of the ioctl requests of VFIO and IOMMUFD.
const VFIO: u8 = b';';
/// `KVM_SET_USER_MEMORY_REGION`, which shows chunks of window memory to the guest and hides them.
const SHOW_MEMORY: u32 = 0x4020_ae46;
/// `TUNSETOFFLOAD` and `TUNSETQUEUE`.
const TAP_OFFLOADS: u32 = 0x4004_54d0;
const TAP_QUEUES: u32 = 0x4004_54d9;
/// `FIONBIO`.
const NOT_BLOCKING: u32 = 0x5421;

/// Calls that read, write, flush and resize files that are already open. Reads and writes have an explicit offset.
pub const AT_PLACES: &[Call] = &[
    Any(libc::SYS_pread64),
    Any(libc::SYS_pwrite64),
    Any(libc::SYS_preadv),
    Any(libc::SYS_pwritev),
    Any(libc::SYS_preadv2),
    Any(libc::SYS_pwritev2),
    Any(libc::SYS_fallocate),
    Any(libc::SYS_ftruncate),
    Any(libc::SYS_fdatasync),
    Any(libc::SYS_fsync),
];

/// Call that submits operations to io_uring rings. No role may create or change rings, because seccomp filters do not see the operations in
/// a ring.
pub const URING: &[Call] = &[Any(libc::SYS_io_uring_enter)];

/// Calls that read and change the scheduling policy of the calling thread. The thread ID must be 0, so a role with these calls cannot
/// change another thread.
pub const POLICY: &[Call] = &[With(libc::SYS_sched_getscheduler, 0, 0), With(libc::SYS_sched_setscheduler, 0, 0)];

/// Calls that wait for events of several files (epoll).
pub const WAITING: &[Call] = &[
    Any(libc::SYS_epoll_create1),
    Any(libc::SYS_epoll_ctl),
    Any(libc::SYS_epoll_wait),
    Any(libc::SYS_epoll_pwait),
    Any(libc::SYS_epoll_pwait2),
];

/// Calls that send and receive data on an existing socket, shut the socket down, and read its options.
pub const MESSAGES: &[Call] = &[
    Any(libc::SYS_sendmsg),
    Any(libc::SYS_recvmsg),
    Any(libc::SYS_sendto),
    Any(libc::SYS_recvfrom),
    Any(libc::SYS_shutdown),
    Any(libc::SYS_getsockopt),
];

/// Flags that a caller of `socket` may add to the type of the socket.
const SOCKET_FLAGS: u32 = (libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK).cast_unsigned();

/// Allows `call` (`socket` or `socketpair`) only for Unix stream sockets. A stream socket sends only to the socket that it is connected to.
pub const fn unix_stream(call: i64) -> Call {
    const STREAM: &[Argument] =
        &[Is(0, libc::AF_UNIX.cast_unsigned()), Bits(1, !SOCKET_FLAGS, libc::SOCK_STREAM.cast_unsigned()), Is(2, 0)];
    Where(call, STREAM)
}

/// Calls that create Internet datagram sockets. The `ioctl` requests about network interfaces need such a socket.
pub const INTERNET_DATAGRAMS: &[Call] = {
    const DATAGRAMS: Argument = Bits(1, !SOCKET_FLAGS, libc::SOCK_DGRAM.cast_unsigned());
    &[
        Where(libc::SYS_socket, &[Is(0, libc::AF_INET.cast_unsigned()), DATAGRAMS, Is(2, 0)]),
        Where(libc::SYS_socket, &[Is(0, libc::AF_INET6.cast_unsigned()), DATAGRAMS, Is(2, 0)]),
    ]
};

/// Call that reads a resource limit of this process.
pub const READ_LIMIT: Call = Where(libc::SYS_prlimit64, &[Is(0, 0), Null(2)]);

/// Allows `fcntl` with this command.
pub const fn fcntl(command: i32) -> Call {
    With(libc::SYS_fcntl, 1, command.cast_unsigned())
}

/// Calls that create and accept connections over Unix stream sockets, to and from other programs of the host.
pub(crate) const SOCKETS: &[Call] = &[
    Any(libc::SYS_accept),
    Any(libc::SYS_accept4),
    unix_stream(libc::SYS_socket),
    Any(libc::SYS_connect),
    Ioctl(NOT_BLOCKING),
];

/// Calls that virtio-iommu requests need for mappings of the host's IOMMU and for window memory.
pub const MAPPINGS: &[Call] = &[
    IoctlsOf(VFIO),
    Ioctl(SHOW_MEMORY),
    Any(libc::SYS_fallocate),
    Any(libc::SYS_ftruncate),
    Any(libc::SYS_memfd_create),
    fcntl(libc::F_ADD_SEALS),
    READ_LIMIT,
    Any(libc::SYS_getrlimit),
];

/// Calls that limit the files that the thread may access (Landlock). A thread can add limits but not remove them.
pub const FILE_LIMITS: &[Call] =
    &[Any(libc::SYS_landlock_create_ruleset), Any(libc::SYS_landlock_add_rule), Any(libc::SYS_landlock_restrict_self)];

/// Requests that change the queues and offloads of a tap interface.
pub const TAP: &[Call] = &[Ioctl(TAP_OFFLOADS), Ioctl(TAP_QUEUES)];

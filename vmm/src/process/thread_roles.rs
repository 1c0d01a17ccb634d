// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Roles of the VMM's own threads. A role lists the system calls that its threads may make. The modules of devices define the roles of the
//! devices' threads.

use devices::sandbox::Argument::Is;
use devices::sandbox::Call::{self, Any, Ioctl, IoctlsOf, OnItself, Where, With};
use devices::sandbox::ThreadRole;
use devices::sandbox::calls::{
    AT_PLACES, FILE_LIMITS, INTERNET_DATAGRAMS, MAPPINGS, MESSAGES, READ_LIMIT, TAP as TAP_QUEUES, WAITING, fcntl,
    unix_stream,
};

/// ioctl types: `KVM` for requests of KVM, and `VFIO` for requests of VFIO and IOMMUFD.
const KVM: u8 = 0xae;
const VFIO: u8 = b';';

/// KVM requests of a vCPU thread. `KVM_RUN` runs the vCPU. The guest's accesses to device registers can cause the other requests:
/// `KVM_IRQ_LINE`, `KVM_SET_USER_MEMORY_REGION`, `KVM_SET_GSI_ROUTING`, `KVM_IRQFD`, `KVM_IOEVENTFD`, `KVM_SIGNAL_MSI`.
const OF_VCPU: &[Call] = &[
    Ioctl(0xae80),
    Ioctl(0x4008_ae61),
    Ioctl(0x4020_ae46),
    Ioctl(0x4008_ae6a),
    Ioctl(0x4020_ae76),
    Ioctl(0x4040_ae79),
    Ioctl(0x4020_aea5),
];

/// Calls that create and open files, and read their metadata.
const FILES: &[Call] = &[
    Any(libc::SYS_open),
    Any(libc::SYS_openat),
    Any(libc::SYS_openat2),
    Any(libc::SYS_stat),
    Any(libc::SYS_lstat),
    Any(libc::SYS_newfstatat),
    Any(libc::SYS_statx),
    Any(libc::SYS_statfs),
    Any(libc::SYS_fstatfs),
    Any(libc::SYS_access),
    Any(libc::SYS_faccessat),
    Any(libc::SYS_faccessat2),
    Any(libc::SYS_readlink),
    Any(libc::SYS_readlinkat),
    Any(libc::SYS_getdents64),
    Any(libc::SYS_getcwd),
    Any(libc::SYS_mkdir),
    Any(libc::SYS_mkdirat),
    Any(libc::SYS_rmdir),
    Any(libc::SYS_unlink),
    Any(libc::SYS_unlinkat),
    Any(libc::SYS_rename),
    Any(libc::SYS_renameat),
    Any(libc::SYS_renameat2),
    Any(libc::SYS_chmod),
    Any(libc::SYS_fchmod),
    Any(libc::SYS_fchmodat),
    Any(libc::SYS_flock),
    fcntl(libc::F_OFD_SETLK),
    fcntl(libc::F_OFD_GETLK),
    fcntl(libc::F_ADD_SEALS),
    Any(libc::SYS_fadvise64),
    Any(libc::SYS_memfd_create),
    Any(libc::SYS_pipe2),
];

/// Calls for Unix sockets.
const SOCKETS: &[Call] = &[
    unix_stream(libc::SYS_socket),
    unix_stream(libc::SYS_socketpair),
    Any(libc::SYS_bind),
    Any(libc::SYS_listen),
    Any(libc::SYS_connect),
    Any(libc::SYS_getsockname),
    Any(libc::SYS_getpeername),
];

/// Calls that serve a client of a socket.
const CLIENT: &[Call] = &[
    Any(libc::SYS_accept4),
    Any(libc::SYS_accept),
    Any(libc::SYS_recvfrom),
    Any(libc::SYS_recvmsg),
    Any(libc::SYS_sendto),
    Any(libc::SYS_sendmsg),
    Any(libc::SYS_shutdown),
    Any(libc::SYS_getsockopt),
    Ioctl(0x5421),
];

/// Requests that set up a tap interface: `TUNSETIFF`, `TUNGETIFF`, `TUNGETFEATURES`, `TUNSETVNETHDRSZ`, `TUNSETPERSIST`. Other requests of
/// the same ioctl type are not allowed. Requests of terminals have the same type, and some of these requests can fake input.
const TAP: &[Call] =
    &[Ioctl(0x4004_54ca), Ioctl(0x8004_54d2), Ioctl(0x8004_54cf), Ioctl(0x4004_54d8), Ioctl(0x4004_54cb)];

/// Requests that create a pseudoterminal and read a terminal's size: `TIOCGWINSZ`, `TIOCGPTN`, `TIOCSPTLCK`, `TIOCGPTPEER`.
const TERMINAL: &[Call] = &[Ioctl(0x5413), Ioctl(0x8004_5430), Ioctl(0x4004_5431), Ioctl(0x5441)];

/// Calls for the scheduling of this thread, and for limits, user and group of the process.
const PROCESS: &[Call] = &[
    With(libc::SYS_sched_getattr, 0, 0),
    Where(libc::SYS_sched_setattr, &[Is(0, 0), Is(2, 0)]),
    READ_LIMIT,
    Any(libc::SYS_getrlimit),
    Any(libc::SYS_getuid),
    Any(libc::SYS_geteuid),
    Any(libc::SYS_getgid),
    Any(libc::SYS_getegid),
    Any(libc::SYS_uname),
    Any(libc::SYS_sysinfo),
    OnItself(libc::SYS_kill),
];

/// Call that sets the host NUMA node of RAM. Only calls without flags are allowed, because they do not move existing pages.
const NODES: &[Call] = &[With(libc::SYS_mbind, 5, 0)];

const DRIVERS: &[Call] = &[IoctlsOf(KVM), IoctlsOf(VFIO)];

/// Requests that read and set up a network interface: `SIOCGIFFLAGS`, `SIOCSIFFLAGS`, `SIOCSIFADDR`, `SIOCSIFNETMASK`, `SIOCGIFMTU`,
/// `SIOCSIFMTU`, `SIOCSIFHWADDR`, `SIOCGIFINDEX`.
const INTERFACES: &[Call] = &[
    Ioctl(0x8913),
    Ioctl(0x8914),
    Ioctl(0x8916),
    Ioctl(0x891c),
    Ioctl(0x8921),
    Ioctl(0x8922),
    Ioctl(0x8924),
    Ioctl(0x8933),
];

/// Requests that read a block device's size, its sector sizes, and whether the device is read-only: `BLKSSZGET`, `BLKPBSZGET`,
/// `BLKGETSIZE64`, `BLKROGET`.
const BLOCK_DEVICES: &[Call] = &[Ioctl(0x1268), Ioctl(0x127b), Ioctl(0x8008_1272), Ioctl(0x125e)];

/// The first thread, which builds the VM with all its parts, and handles messages.
pub const CONTROL: ThreadRole = ThreadRole {
    name: "control",
    calls: &[
        FILES,
        SOCKETS,
        INTERNET_DATAGRAMS,
        CLIENT,
        TAP,
        TERMINAL,
        PROCESS,
        NODES,
        DRIVERS,
        INTERFACES,
        BLOCK_DEVICES,
        MAPPINGS,
        WAITING,
        AT_PLACES,
        TAP_QUEUES,
        FILE_LIMITS,
    ],
};

/// Thread that serves HTTP clients.
pub const API: ThreadRole = ThreadRole { name: "api", calls: &[CLIENT, PROCESS, WAITING, FILE_LIMITS] };

/// Thread that runs a vCPU and serves the guest's accesses to devices.
pub const VCPU: ThreadRole = ThreadRole {
    name: "vcpu",
    // A guest's access can start, stop or notify a device, and make the virtio-iommu map memory.
    calls: &[OF_VCPU, MAPPINGS, WAITING, AT_PLACES, TAP_QUEUES, MESSAGES],
};

/// Request that reads a terminal's size: `TIOCGWINSZ`.
const TERMINAL_SIZE: &[Call] = &[Ioctl(0x5413)];

/// Thread that turns signals into messages, and reads the size of the terminal.
pub const SIGNALS: ThreadRole = ThreadRole { name: "signals", calls: &[CLIENT, FILE_LIMITS, TERMINAL_SIZE] };

/// Thread that writes queued output: the log, events, or console output.
pub const WRITER: ThreadRole = ThreadRole { name: "writer", calls: &[FILE_LIMITS] };

/// Thread that serves the client of a console's socket or pseudoterminal, and removes the socket at the end.
pub const LINE: ThreadRole = ThreadRole {
    name: "line",
    calls: &[
        CLIENT,
        TERMINAL_SIZE,
        &[Any(libc::SYS_lstat), Any(libc::SYS_newfstatat), Any(libc::SYS_statx), Any(libc::SYS_unlink)],
    ],
};

/// Thread that reads standard input for the guest.
pub const STDIN: ThreadRole = ThreadRole { name: "stdin", calls: &[] };

/// Thread that loads the guest's boot files, which are already open.
pub const LOADER: ThreadRole = ThreadRole { name: "loader", calls: &[] };

/// All roles of this module except [`CONTROL`], the role of the first thread.
pub const STARTED: [ThreadRole; 7] = [API, VCPU, SIGNALS, WRITER, LINE, STDIN, LOADER];

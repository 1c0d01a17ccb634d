// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The threads of devices: what each does, and the system calls that it makes for that.

use super::call::{Call, ThreadRole};
use super::calls::{AT_PLACES, MAPPINGS, MESSAGES, OPENING, SOCKET_PAIRS, SOCKETS, TAP, URING, WAITING};

/// What a thread does, which says what it needs of the host's kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Reads random bytes from a file for a guest.
    Rng,
    /// Gives memory of the guest back to the host.
    Balloon,
    /// Serves the queue of a device of persistent memory: flushes its file.
    Pmem,
    /// Serves a queue of a disk: reads and writes its image.
    Block,
    /// Serves a queue of packets of a network device: reads and writes the file of the host's interface.
    Net,
    /// Serves the control queue of a network device: tells the host's interface of its queues.
    NetControl,
    /// Carries bytes between the guest's console and the host.
    Console,
    /// Carries bytes between sockets of the guest and of the host.
    Vsock,
    /// Waits for the end of a watchdog's counter.
    Watchdog,
    /// Polls the request queue of the virtio-iommu.
    IommuPoll,
    /// Allocates window memory ahead of requests, and gives it back.
    WindowStash,
    /// Opens a chunk of window memory anew, for a server that is to read it only.
    WindowReader,
    /// Tells the driver of the virtio-iommu of accesses that were stopped.
    DmaFaults,
    /// Waits for what the host says of a device that it gave.
    VfioNotices,
    /// Reads what the server of a vfio-user device sends, and copies what it asks for.
    VfioUser,
    /// Waits for the server of a vhost-user device, looks for the next one and tells it of the device, or of the pairs of queues that
    /// a driver uses, or ends a connection whose server takes too long.
    VhostUser,
}

impl Role {
    /// All of them.
    pub const ALL: &[Self] = &[
        Self::Rng,
        Self::Balloon,
        Self::Pmem,
        Self::Block,
        Self::Net,
        Self::NetControl,
        Self::Console,
        Self::Vsock,
        Self::Watchdog,
        Self::IommuPoll,
        Self::WindowStash,
        Self::WindowReader,
        Self::DmaFaults,
        Self::VfioNotices,
        Self::VfioUser,
        Self::VhostUser,
    ];

    /// Its name, as in names of threads.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rng => "rng",
            Self::Balloon => "balloon",
            Self::Pmem => "pmem",
            Self::Block => "block",
            Self::Net => "net",
            Self::NetControl => "net_control",
            Self::Console => "console",
            Self::Vsock => "vsock",
            Self::Watchdog => "watchdog",
            Self::IommuPoll => "iommu_poll",
            Self::WindowStash => "window-stash",
            Self::WindowReader => "window-reader",
            Self::DmaFaults => "dma-faults",
            Self::VfioNotices => "vfio-notices",
            Self::VfioUser => "vfio-user",
            Self::VhostUser => "vhost-user",
        }
    }

    /// The calls that it makes, beside those of every thread.
    fn calls(self) -> &'static [&'static [Call]] {
        match self {
            Self::Rng | Self::Balloon | Self::Net | Self::Console | Self::Watchdog | Self::DmaFaults => &[],
            Self::Pmem => &[AT_PLACES],
            Self::Block => &[AT_PLACES, URING, WAITING],
            Self::NetControl => &[TAP],
            Self::Vsock => &[MESSAGES, SOCKETS, WAITING],
            Self::IommuPoll => &[MAPPINGS, MESSAGES],
            Self::WindowStash => &[MAPPINGS],
            Self::WindowReader => &[OPENING],
            Self::VfioNotices => &[WAITING],
            Self::VfioUser => &[MESSAGES],
            Self::VhostUser => &[MESSAGES, SOCKETS, SOCKET_PAIRS],
        }
    }

    /// The same, for the thread's start.
    pub fn thread(self) -> ThreadRole {
        ThreadRole { name: self.name(), calls: self.calls() }
    }
}

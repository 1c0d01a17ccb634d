// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The list of what threads of devices do. Which system calls each makes for that stands beside its device's code, in `role.rs`.

use super::call::ThreadRole;
use crate::virtio::{balloon, block, console, iommu, net, pmem, rng, vhost_user, vsock, windows};
use crate::{dma, vfio, watchdog};

/// What a thread does.
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
        self.thread().name
    }

    /// What the device's own module says of it, for the thread's start.
    pub fn thread(self) -> ThreadRole {
        match self {
            Self::Rng => rng::role::ROLE,
            Self::Balloon => balloon::role::ROLE,
            Self::Pmem => pmem::role::ROLE,
            Self::Block => block::role::ROLE,
            Self::Net => net::role::ROLE,
            Self::NetControl => net::role::CONTROL_ROLE,
            Self::Console => console::role::ROLE,
            Self::Vsock => vsock::role::ROLE,
            Self::Watchdog => watchdog::role::ROLE,
            Self::IommuPoll => iommu::role::ROLE,
            Self::WindowStash => windows::role::STASH_ROLE,
            Self::WindowReader => windows::role::READER_ROLE,
            Self::DmaFaults => dma::role::ROLE,
            Self::VfioNotices => vfio::NOTICES_ROLE,
            Self::VfioUser => vfio::user::role::ROLE,
            Self::VhostUser => vhost_user::role::ROLE,
        }
    }
}

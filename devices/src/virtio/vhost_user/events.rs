// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Eventfds of a queue. The eventfds exist as long as the device.

use vmm_sys_util::eventfd::EventFd;

/// Eventfds of a queue. The server has copies of both eventfds.
pub(super) struct QueueEvents {
    /// Eventfd that notifies the server of new buffers.
    pub(super) kick: EventFd,
    /// Eventfd that the server writes for used buffers, if the queue's interrupt has no eventfd.
    pub(super) call: EventFd,
}

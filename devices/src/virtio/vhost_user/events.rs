// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The events of a queue that do not change.

use vmm_sys_util::eventfd::EventFd;

/// Both are the server's too.
pub(super) struct QueueEvents {
    /// Rung by the driver.
    pub(super) kick: EventFd,
    /// Rung by the server while the driver has no interrupt that an event could raise.
    pub(super) call: EventFd,
}

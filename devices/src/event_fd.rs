// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Events as descriptors that can be sent.

use std::os::fd::{AsRawFd, BorrowedFd};

use vmm_sys_util::eventfd::EventFd;

/// The event's descriptor.
pub(crate) fn borrow(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: The event owns its descriptor, which stays open as long as the event is borrowed.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Asks the host for a page without touching it, so that a missing page is an error number and no signal.

use std::io;
use std::ptr;

use rustix::mm::{Advice, madvise};

/// Smallest page of the host.
const PAGE: usize = 4096;

/// Has the host supply the page that holds `address`, for reading or also for writing.
///
/// # Errors
/// `EFAULT` if the page is missing, `EHWPOISON` if it has a memory error, and whatever else the kernel says.
pub fn populate_page(address: usize, for_writing: bool) -> io::Result<()> {
    let advice = if for_writing { Advice::LinuxPopulateWrite } else { Advice::LinuxPopulateRead };
    let page = ptr::with_exposed_provenance_mut(address & !(PAGE - 1));
    // SAFETY: This advice changes the contents of no page. Where nothing is mapped the call fails.
    Ok(unsafe { madvise(page, PAGE, advice) }?)
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Asks the host for a page without touching the page, so that a missing page causes an error number instead of a signal.

use std::io;
use std::ptr;

use rustix::mm::{Advice, madvise};

/// Smallest page size of the host.
const PAGE: usize = 4096;

/// Makes the host supply the page at `address`, for reads and writes if `for_writing` is true, and otherwise for reads only.
///
/// # Errors
/// `EFAULT` if the page is missing, `EHWPOISON` if the page has a memory error, and any other error of the kernel.
pub fn populate_page(address: usize, for_writing: bool) -> io::Result<()> {
    let advice = if for_writing { Advice::LinuxPopulateWrite } else { Advice::LinuxPopulateRead };
    let page = ptr::with_exposed_provenance_mut(address & !(PAGE - 1));
    // SAFETY: This advice does not change the contents of any page. If nothing is mapped, the call fails.
    Ok(unsafe { madvise(page, PAGE, advice) }?)
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The system call.

use std::io;
use std::ops::Range;

use rustix::mm::{Advice, madvise};
use vm_memory::GuestMemoryRegion;

use crate::ram::RamRegion;

/// Gives whole pages of a region back to the host, by their offsets in it. RAM that is a file's loses them in the file, so for all
/// who have mapped it.
pub(super) fn discard(region: &RamRegion, range: &Range<u64>) -> io::Result<()> {
    assert!(range.start <= range.end && range.end <= region.len(), "{range:?} is outside of its region");
    let offset = usize::try_from(range.start).map_err(io::Error::other)?;
    let len = usize::try_from(range.end - range.start).map_err(io::Error::other)?;
    let start = region.as_ptr().wrapping_add(offset);
    let advice = if region.file_offset().is_some() { Advice::LinuxRemove } else { Advice::LinuxDontNeed };
    // SAFETY: the range is in the region's mapping, which stays. What is there changes as if the guest had written it, which it may
    // do at any time: nobody has a Rust reference to guest RAM.
    Ok(unsafe { madvise(start.cast(), len, advice) }?)
}

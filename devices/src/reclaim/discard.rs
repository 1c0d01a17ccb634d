// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! System call that gives pages back to the host.

use std::io;
use std::ops::Range;

use rustix::mm::{Advice, madvise};
use vm_memory::GuestMemoryRegion;

use crate::ram::RamRegion;

/// Gives whole pages of a region back to the host. `range` has offsets in the region. If a file backs the RAM, the pages are removed from
/// the file, and so from all mappings of the file.
pub(super) fn discard(region: &RamRegion, range: &Range<u64>) -> io::Result<()> {
    assert!(range.start <= range.end && range.end <= region.len(), "{range:?} is outside of its region");
    let offset = usize::try_from(range.start).map_err(io::Error::other)?;
    let len = usize::try_from(range.end - range.start).map_err(io::Error::other)?;
    let start = region.as_ptr().wrapping_add(offset);
    let advice = if region.file_offset().is_some() { Advice::LinuxRemove } else { Advice::LinuxDontNeed };
    // SAFETY: The range lies in the region's mapping, which is not removed. The bytes of the range change as if the guest had written them.
    // The guest may do this at any time, so no code has a Rust reference to guest RAM.
    Ok(unsafe { madvise(start.cast(), len, advice) }?)
}

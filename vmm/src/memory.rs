// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The guest's RAM: one shared memfd, mapped below and above the 32-bit PCI hole.

use std::fs::File;
use std::io;
use std::sync::Arc;

use devices::platform::{HostRange, MemorySlots};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use thiserror::Error;
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap, MmapRegion,
};

use crate::layout::{HIGH_MEMORY_START, LOW_MEMORY_END};

/// Why the guest has no RAM.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// The memfd could not be made.
    #[error("making {size} bytes of guest RAM: {source}")]
    Create {
        /// Bytes asked for.
        size: u64,
        /// What the kernel said.
        source: io::Error,
    },
    /// It could not be mapped into this process.
    #[error("mapping {size} bytes of guest RAM: {message}")]
    Map {
        /// Bytes asked for.
        size: u64,
        /// What vm-memory said.
        message: String,
    },
    /// KVM did not take it.
    #[error("showing RAM at {gpa:#x} to the guest: {source}")]
    Slot {
        /// Guest-physical address.
        gpa: u64,
        /// What KVM said.
        source: io::Error,
    },
}

/// Ranges of RAM as (guest-physical address, size) for `size` bytes in all.
pub fn ranges(size: u64) -> Vec<(u64, u64)> {
    let low = size.min(LOW_MEMORY_END);
    let mut ranges = vec![(0, low)];
    if size > low {
        ranges.push((HIGH_MEMORY_START, size - low));
    }
    ranges
}

/// First address above all RAM and the 32-bit hole.
pub fn end(size: u64) -> u64 {
    HIGH_MEMORY_START + size.saturating_sub(LOW_MEMORY_END)
}

/// Makes `size` bytes of RAM. No page is there before the guest, or a device, touches it.
pub fn create(size: u64) -> Result<Arc<GuestMemoryMmap>, MemoryError> {
    let make = || {
        let fd = memfd_create("carom-guest-ram", MemfdFlags::CLOEXEC)?;
        ftruncate(&fd, size)?;
        Ok(Arc::new(File::from(fd)))
    };
    let file = make().map_err(|error: rustix::io::Errno| MemoryError::Create { size, source: error.into() })?;
    let fail = |message: String| MemoryError::Map { size, message };
    let mut offset = 0;
    let mut regions = Vec::new();
    for (gpa, len) in ranges(size) {
        let len_usize = usize::try_from(len).map_err(|e| fail(e.to_string()))?;
        let mapping = MmapRegion::from_file(FileOffset::from_arc(file.clone(), offset), len_usize)
            .map_err(|e| fail(e.to_string()))?;
        let region = GuestRegionMmap::new(mapping, GuestAddress(gpa)).ok_or_else(|| fail("it wraps around".into()))?;
        regions.push(region);
        offset += len;
    }
    Ok(Arc::new(GuestMemoryMmap::from_regions(regions).map_err(|e| fail(e.to_string()))?))
}

/// Shows all RAM to the guest. The slots stay for the life of the VM.
pub fn show(memory: &Arc<GuestMemoryMmap>, slots: &dyn MemorySlots) -> Result<(), MemoryError> {
    for region in memory.iter() {
        let gpa = region.start_addr().0;
        let host = HostRange { address: region.as_ptr() as usize, len: region.size() };
        // SAFETY: the VM keeps the guest memory mapped as long as KVM's VM exists (it owns both, and drops the memory
        // last), and vm-memory hands out no Rust references to it.
        unsafe { slots.insert(gpa, host, false) }.map_err(|source| MemoryError::Slot { gpa, source })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::GIB;

    #[test]
    fn ram_below_the_hole_is_one_range() {
        assert_eq!(ranges(2 * GIB), [(0, 2 * GIB)]);
        assert_eq!(end(2 * GIB), 4 * GIB);
    }

    #[test]
    fn ram_beyond_the_hole_goes_on_above_4_gib() {
        assert_eq!(ranges(5 * GIB), [(0, 3 * GIB), (4 * GIB, 2 * GIB)]);
        assert_eq!(end(5 * GIB), 6 * GIB);
    }

    #[test]
    fn ram_is_made_lazily_and_mapped_at_its_ranges() {
        let memory = create(4 * GIB).unwrap();
        assert_eq!(memory.num_regions(), 2);
        assert_eq!(memory.last_addr().0, 5 * GIB - 1);
        assert!(!memory.address_in_range(GuestAddress(3 * GIB)));
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The guest's RAM, mapped below and above the 32-bit PCI hole: memory of this process, or a shared memfd.

use std::fs::File;
use std::io;
use std::sync::Arc;

use devices::platform::{HostRange, MemorySlots};
use devices::ram::{Ram, RamRegion};
use log::debug;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{Advice, madvise};
use thiserror::Error;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, MmapRegion};

use crate::arch::layout::{HIGH_MEMORY_START, LOW_MEMORY_END, MIB};
use carom_api::config::MemoryConfig;

/// Why the guest has no RAM.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// The memfd could not be made.
    #[error("making {size} bytes of guest RAM: {source}{}", hint(*hugepages))]
    Create {
        /// Bytes asked for.
        size: u64,
        /// Whether they were to be reserved huge pages.
        hugepages: bool,
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

fn hint(hugepages: bool) -> &'static str {
    if hugepages {
        " (memory of hugepages needs as many free huge pages of 2 MiB, see /proc/sys/vm/nr_hugepages)"
    } else {
        ""
    }
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

/// Pages that make the host's page tables, KVM's and those of the IOMMU shorter.
const HUGE_PAGE: u64 = 2 * MIB;

/// Makes RAM. No page is there before the guest, or a device, touches it; but reserved huge pages are all taken at once.
///
/// Private memory is the default, as the host's kernels by default give huge pages to that, but none to a memfd: with 4 KiB
/// pages, all that the guest does is slower (docs/benchmarks.md). A memfd is for those who share the RAM with other processes.
pub fn create(config: &MemoryConfig) -> Result<Arc<Ram>, MemoryError> {
    let size = config.size;
    let file = (config.shared || config.hugepages).then(|| memfd(config)).transpose()?;
    let mut offset = 0;
    let mut regions = Vec::new();
    for (gpa, len) in ranges(size) {
        let place = file.as_ref().map(|file| FileOffset::from_arc(file.clone(), offset));
        let mapping = map_aligned(place.as_ref(), len).map_err(|message| MemoryError::Map { size, message })?;
        if config.thp && !config.hugepages {
            ask_for_huge_pages(&mapping);
        }
        let region = RamRegion::new(mapping, GuestAddress(gpa))
            .ok_or_else(|| MemoryError::Map { size, message: "it wraps around".into() })?;
        regions.push(region);
        offset += len;
    }
    let memory = Ram::new(regions, 0);
    Ok(Arc::new(memory.map_err(|error| MemoryError::Map { size, message: error.to_string() })?))
}

fn memfd(config: &MemoryConfig) -> Result<Arc<File>, MemoryError> {
    let size = config.size;
    let flags = if config.hugepages { MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB } else { MemfdFlags::empty() };
    let make = || {
        let fd = memfd_create("carom-guest-ram", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | flags)?;
        ftruncate(&fd, size)?;
        // Who cut it short would have this process killed.
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        if config.hugepages {
            // All are taken now: a guest that touches one when none is left would kill this process.
            fallocate(&fd, FallocateFlags::empty(), 0, size)?;
        }
        Ok(Arc::new(File::from(fd)))
    };
    make().map_err(|error: rustix::io::Errno| MemoryError::Create {
        size,
        hugepages: config.hugepages,
        source: error.into(),
    })
}

/// Maps `len` bytes, at a multiple of the huge page's size if it can be had: KVM and the kernel can use huge pages only where
/// guest-physical and host addresses are equal modulo their size.
fn map_aligned(file: Option<&FileOffset>, len: u64) -> Result<MmapRegion, String> {
    let map = |len: u64| -> Result<MmapRegion, String> {
        let len = usize::try_from(len).map_err(|error| error.to_string())?;
        match file {
            Some(file) => MmapRegion::from_file(file.clone(), len).map_err(|error| error.to_string()),
            None => MmapRegion::new(len).map_err(|error| error.to_string()),
        }
    };
    let excess = |mapping: &MmapRegion| mapping.as_ptr() as u64 % HUGE_PAGE;
    let first = map(len)?;
    let too_high = excess(&first);
    if too_high == 0 {
        return Ok(first);
    }
    // The kernel puts a mapping right below an earlier one. So with the first one gone and a filler that ends where it ended,
    // the next try lies lower by the filler's size. Should the kernel do otherwise, RAM is slower, but no less right.
    drop(first);
    let filler = MmapRegion::<()>::new(usize::try_from(too_high).map_err(|error| error.to_string())?);
    let second = map(len)?;
    drop(filler);
    if excess(&second) != 0 {
        debug!("guest RAM of {len:#x} bytes is at {:p}, which rules out huge pages for it", second.as_ptr());
    }
    Ok(second)
}

/// Asks for transparent huge pages: by default, some hosts give them to those that ask only.
fn ask_for_huge_pages(mapping: &MmapRegion) {
    // SAFETY: the range is the mapping's own, and this advice changes nothing of its contents.
    let result = unsafe { madvise(mapping.as_ptr().cast(), mapping.size(), Advice::LinuxHugepage) };
    if let Err(error) = result {
        debug!("the host has no transparent huge pages: {error}");
    }
}

/// Shows all RAM to the guest. The slots stay for the life of the VM.
pub fn show(memory: &Arc<Ram>, slots: &dyn MemorySlots) -> Result<(), MemoryError> {
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
    use crate::arch::layout::GIB;

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
        for shared in [false, true] {
            let memory = create(&MemoryConfig { shared, ..MemoryConfig::with_size(4 * GIB) }).unwrap();
            assert_eq!(memory.num_regions(), 2);
            assert_eq!(memory.last_addr().0, 5 * GIB - 1);
            assert!(!memory.address_in_range(GuestAddress(3 * GIB)));
        }
    }

    #[test]
    fn ram_can_be_made_of_huge_pages() {
        // Repeated, as each mapping changes where the next one goes.
        let kept: Vec<_> = (0..4).map(|_| create(&MemoryConfig::with_size(64 * MIB)).unwrap()).collect();
        for memory in &kept {
            let region = memory.iter().next().unwrap();
            assert_eq!(region.as_ptr() as u64 % HUGE_PAGE, 0);
        }
    }

    #[test]
    fn shared_ram_has_a_file_and_private_ram_has_none() {
        for shared in [false, true] {
            let memory = create(&MemoryConfig { shared, ..MemoryConfig::with_size(32 * MIB) }).unwrap();
            let mut files = memory.iter().map(GuestMemoryRegion::file_offset);
            assert!(
                files.all(|file| file.is_some() == shared && file.is_none_or(|file| file.file().set_len(0).is_err()))
            );
        }
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The guest's RAM, mapped below and above the 32-bit PCI hole: memory of this process, or a shared memfd.

use std::fs::File;
use std::io;
use std::sync::Arc;

use devices::legacy::memory_devices::MAX_MEMORY_DEVICES;
use devices::platform::{HostRange, MemorySlots};
use devices::ram::{Ram, RamRegion};
use devices::reclaim::Reclaim;
use log::debug;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create};
use rustix::mm::{Advice, madvise};
use thiserror::Error;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, MmapRegion};

use crate::arch::layout::{GIB, HIGH_MEMORY_START, LOW_MEMORY_END, MIB};
use carom_api::config::MemoryConfig;

/// Why the guest has no RAM.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// The memfd could not be made.
    #[error("making {size} bytes of guest RAM: {source}{}", hint(*huge_page))]
    Create {
        /// Bytes asked for.
        size: u64,
        /// Bytes of the reserved huge pages that they were to be made of.
        huge_page: Option<u64>,
        /// What the kernel said.
        source: io::Error,
    },
    /// The host did not give all of it at once.
    #[error("prefaulting {size} bytes of guest RAM: {source}")]
    Prefault {
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

fn hint(huge_page: Option<u64>) -> String {
    let Some(bytes) = huge_page else { return String::new() };
    format!(" (memory of hugepages needs as many free huge pages of {} MiB, see /sys/kernel/mm/hugepages)", bytes / MIB)
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

/// Pages that RAM is made of unless the host's reserved ones are asked for.
const SMALL_PAGE: u64 = 4096;
/// Pages that make the host's page tables, KVM's and those of the IOMMU shorter.
const HUGE_PAGE: u64 = 2 * MIB;

/// Makes RAM for the VM to boot with. No page is there before the guest, or a device, touches it; but reserved huge pages are all
/// taken at once.
///
/// Private memory is the default, as the host's kernels by default give huge pages to that, but none to a memfd: with 4 KiB
/// pages, all that the guest does is slower (docs/benchmarks.md). A memfd is for those who share the RAM with other processes.
pub fn create(config: &MemoryConfig) -> Result<Arc<Ram>, MemoryError> {
    let size = config.size;
    let regions = regions(config, &ranges(size))?;
    let more = if config.hotplug_size == 0 { 0 } else { MAX_MEMORY_DEVICES };
    Ok(Arc::new(Ram::new(regions, more).map_err(|error| MemoryError::Map { size, message: error.to_string() })?))
}

/// Makes a region of RAM that comes while the guest runs.
pub fn region(config: &MemoryConfig, gpa: u64, len: u64) -> Result<RamRegion, MemoryError> {
    let mut regions = regions(config, &[(gpa, len)])?;
    regions.pop().ok_or_else(|| MemoryError::Map { size: len, message: "it has no region".into() })
}

fn regions(config: &MemoryConfig, ranges: &[(u64, u64)]) -> Result<Vec<RamRegion>, MemoryError> {
    let size = ranges.iter().map(|(_, len)| len).sum();
    let file = config.can_be_shared().then(|| memfd(config, size)).transpose()?;
    let mut offset = 0;
    let mut regions = Vec::new();
    for &(gpa, len) in ranges {
        let place = file.as_ref().map(|file| FileOffset::from_arc(file.clone(), offset));
        let mapping = map_aligned(config, place.as_ref(), len).map_err(|message| MemoryError::Map { size, message })?;
        // It is the guest's, and far larger than all else.
        advise(&mapping, Advice::LinuxDontDump, "core dumps without guest RAM");
        if config.thp && !config.hugepages {
            advise(&mapping, Advice::LinuxHugepage, "transparent huge pages");
        }
        if config.mergeable {
            advise(&mapping, Advice::LinuxMergeable, "merging of pages");
        }
        if config.prefault {
            populate(&mapping).map_err(|source| MemoryError::Prefault { size, source })?;
        }
        let region = RamRegion::new(mapping, GuestAddress(gpa))
            .ok_or_else(|| MemoryError::Map { size, message: "it wraps around".into() })?;
        regions.push(region);
        offset += len;
    }
    Ok(regions)
}

/// What gives RAM back to the host that the guest does without.
pub fn reclaim(config: &MemoryConfig, ram: &Arc<Ram>) -> Arc<Reclaim> {
    let page = if config.hugepages { config.huge_page() } else { SMALL_PAGE };
    Arc::new(Reclaim::new(ram.clone(), page))
}

fn memfd(config: &MemoryConfig, size: u64) -> Result<Arc<File>, MemoryError> {
    let flags = match config.huge_page() {
        _ if !config.hugepages => MemfdFlags::empty(),
        GIB => MemfdFlags::HUGETLB | MemfdFlags::HUGE_1GB,
        _ => MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
    };
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
        huge_page: config.hugepages.then(|| config.huge_page()),
        source: error.into(),
    })
}

/// Maps `len` bytes, at a multiple of the huge page's size if it can be had: KVM and the kernel can use huge pages only where
/// guest-physical and host addresses are equal modulo their size.
fn map_aligned(config: &MemoryConfig, file: Option<&FileOffset>, len: u64) -> Result<MmapRegion, String> {
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
    // The kernel places reserved huge pages right by itself.
    if too_high == 0 || config.hugepages {
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

/// Asks the host for `what`. By default, some hosts give transparent huge pages to those that ask only.
fn advise(mapping: &MmapRegion, advice: Advice, what: &str) {
    // SAFETY: the range is the mapping's own, and this advice changes nothing of its contents.
    let result = unsafe { madvise(mapping.as_ptr().cast(), mapping.size(), advice) };
    if let Err(error) = result {
        debug!("the host has no {what}: {error}");
    }
}

/// Has the host give all pages of a mapping now.
fn populate(mapping: &MmapRegion) -> io::Result<()> {
    // SAFETY: the range is the mapping's own, and all that happens to its contents is that there are some.
    Ok(unsafe { madvise(mapping.as_ptr().cast(), mapping.size(), Advice::LinuxPopulateWrite) }?)
}

/// Shows all RAM to the guest. The slots stay for the life of the VM.
pub fn show(memory: &Arc<Ram>, slots: &dyn MemorySlots) -> Result<(), MemoryError> {
    memory.iter().try_for_each(|region| show_region(region, slots).map(|_| ()))
}

/// Shows a region to the guest, of RAM that belongs to the VM. Returns its slot.
pub fn show_region(region: &RamRegion, slots: &dyn MemorySlots) -> Result<u32, MemoryError> {
    let gpa = region.start_addr().0;
    let host = HostRange { address: region.as_ptr() as usize, len: region.size() };
    // SAFETY: the VM keeps the guest memory mapped as long as KVM's VM exists (it owns both, and drops the memory
    // last), and vm-memory hands out no Rust references to it.
    unsafe { slots.insert(gpa, host, false) }.map_err(|source| MemoryError::Slot { gpa, source })
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

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
    fn ram_that_is_prefaulted_is_there_and_other_ram_is_not() {
        for prefault in [false, true] {
            let memory = create(&MemoryConfig { prefault, ..MemoryConfig::with_size(64 * MIB) }).unwrap();
            let there = resident(memory.iter().next().unwrap());
            assert_eq!(there, if prefault { 64 * MIB } else { 0 });
        }
    }

    /// Bytes of the mapping of `region` that are in memory.
    fn resident(region: &RamRegion) -> u64 {
        said_by_smaps(region, "Rss:").trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }

    /// What `/proc/self/smaps` says of the mapping of `region`, which may be one with its neighbours'.
    pub(crate) fn said_by_smaps(region: &RamRegion, key: &str) -> String {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let has_start = |line: &str| {
            let (start, end) = line.split_once(' ')?.0.split_once('-')?;
            let number = |text| u64::from_str_radix(text, 16).ok();
            Some((number(start)?..number(end)?).contains(&(region.as_ptr() as u64)))
        };
        let of_mapping = smaps.lines().skip_while(|line| has_start(line) != Some(true));
        of_mapping.skip(1).find_map(|line| line.strip_prefix(key)).unwrap().trim().into()
    }

    #[test]
    fn core_dumps_have_no_guest_ram() {
        for shared in [false, true] {
            let memory = create(&MemoryConfig { shared, ..MemoryConfig::with_size(4 * GIB) }).unwrap();
            for region in memory.iter() {
                let flags = said_by_smaps(region, "VmFlags:");
                assert!(flags.split(' ').any(|flag| flag == "dd"), "shared {shared}: {flags}");
            }
        }
    }

    #[test]
    fn region_that_comes_later_is_of_the_same_kind() {
        for shared in [false, true] {
            let config = MemoryConfig { shared, hotplug_size: GIB, ..MemoryConfig::with_size(32 * MIB) };
            let memory = create(&config).unwrap();
            memory.add(region(&config, 4 * GIB, 128 * MIB).unwrap()).unwrap();
            let last = memory.iter().last().unwrap();
            assert_eq!((last.start_addr().0, last.len(), last.file_offset().is_some()), (4 * GIB, 128 * MIB, shared));
        }
        let fixed = create(&MemoryConfig::with_size(32 * MIB)).unwrap();
        assert!(fixed.add(region(&MemoryConfig::default(), 4 * GIB, 128 * MIB).unwrap()).is_err());
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

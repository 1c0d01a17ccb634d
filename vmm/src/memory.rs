// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The guest's RAM, mapped below and above the 32-bit PCI hole. Each zone is private memory of this process, a shared memfd, or a file.

mod error;
mod names;
mod policy;
mod zone;

use std::sync::Arc;

use carom_api::config::MemoryConfig;
use devices::acpi::memory_devices::MAX_MEMORY_DEVICES;
use devices::platform::{HostRange, MemorySlots};
use devices::ram::{Ram, RamRegion};
use devices::reclaim::Reclaim;
use log::warn;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use crate::arch::layout::zone_ranges;

pub use error::MemoryError;
pub use names::keep_of_restored;
pub use policy::hold_to_node;
pub use zone::{map_privately, populate};

/// Size of RAM's pages, unless the configuration asks for reserved huge pages.
const SMALL_PAGE: u64 = 4096;

/// Creates RAM for the VM to boot with. Pages are allocated when the guest or a device touches them. Only three kinds of pages are
/// allocated immediately: reserved huge pages, pages of zones with `prefault`, and pages of shared zones with `reserve`.
///
/// Private memory is the default, because host kernels by default give transparent huge pages to private memory, but not to a memfd. With 4
/// KiB pages, everything in the guest is slower (docs/benchmarks.md). A memfd is for RAM that is shared with other processes.
///
/// # Errors
/// The host does not provide the memory, or a zone's file cannot be used.
pub fn create(config: &MemoryConfig) -> Result<Arc<Ram>, MemoryError> {
    let (zones, mut regions) = (zone_ranges(config), Vec::new());
    for (zone, ranges) in &zones {
        regions.extend(zone::regions(zone, config.thp, ranges)?);
    }
    let more = if config.hotplug_size == 0 { 0 } else { MAX_MEMORY_DEVICES };
    let size = config.total();
    let ram = Ram::new(regions, more).map_err(|error| MemoryError::Map { size, message: error.to_string() })?;
    let mut first = 0;
    for (zone, ranges) in &zones {
        names::keep_of_zone(&ram, first, ranges.len(), zone);
        first += ranges.len();
    }
    Ok(Arc::new(ram))
}

/// Creates a region of RAM that is added while the guest runs. RAM can be added only to a VM without configured zones.
///
/// # Errors
/// The host does not provide the memory.
pub fn region(config: &MemoryConfig, gpa: u64, len: u64) -> Result<RamRegion, MemoryError> {
    let nothing = || MemoryError::Map { size: len, message: "no region was created".into() };
    let zone = config.all_zones().into_iter().next().ok_or_else(nothing)?;
    zone::regions(&zone, config.thp, &[(gpa, len)])?.pop().ok_or_else(nothing)
}

/// Adds a region to the VM's RAM, and returns the region. If a region with the same range was withdrawn earlier, that region is used again.
/// Regions are never unmapped, so a new mapping for each attempt would fill this process's address space.
///
/// # Errors
/// The host does not provide the memory, `ram` has no place for another region, or `gpa` is not above all RAM. After an error, RAM is
/// unchanged.
pub fn add<'r>(ram: &'r Ram, config: &MemoryConfig, gpa: u64, len: u64) -> Result<&'r RamRegion, MemoryError> {
    let fail = |message: String| MemoryError::Map { size: len, message };
    let start = GuestAddress(gpa);
    let added = match (ram.withdrawn(start, len), config.all_zones().first()) {
        (Some(spare), Some(zone)) => {
            // Refill the region before a device can find it: if reserved pages are missing, an access kills this process.
            zone::refill(zone, spare).inspect_err(|_| give_up(spare))?;
            ram.add_again(start, len).map(drop)
        }
        (_, zone) => ram.add(region(config, gpa, len)?).inspect(|()| {
            if let Some(zone) = zone {
                names::keep_of_zone(ram, ram.num_regions() - 1, 1, zone);
            }
        }),
    };
    added.map_err(|error| fail(error.to_string()))?;
    ram.find_region(start).ok_or_else(|| fail("the new region was removed".into()))
}

/// Returns the pages of a withdrawn region to the host.
pub fn give_up(region: &RamRegion) {
    if let Err(error) = zone::empty(region) {
        warn!(
            "RAM at {:#x} could not be added to the guest, and its host memory cannot be freed: {error}",
            region.start_addr().0
        );
    }
}

/// Creates the service that returns unused RAM to the host. If zones have different page sizes, the service works in units of the largest
/// page size.
pub fn reclaim(config: &MemoryConfig, ram: &Arc<Ram>) -> Arc<Reclaim> {
    let pages = config.all_zones().into_iter().filter(|zone| zone.hugepages).map(|zone| zone.huge_page());
    Arc::new(Reclaim::new(ram.clone(), pages.max().unwrap_or(SMALL_PAGE)))
}

/// Registers all RAM with KVM. The memory slots stay for the life of the VM.
pub fn show(memory: &Arc<Ram>, slots: &dyn MemorySlots) -> Result<(), MemoryError> {
    memory.iter().try_for_each(|region| show_region(region, slots).map(|_| ()))
}

/// Registers a region of the VM's RAM with KVM. Returns the memory slot of the region.
pub fn show_region(region: &RamRegion, slots: &dyn MemorySlots) -> Result<u32, MemoryError> {
    let gpa = region.start_addr().0;
    let host = HostRange { address: region.as_ptr() as usize, len: region.size() };
    // SAFETY: the VM unmaps guest memory only after its vCPUs have ended, so the guest never accesses unmapped memory. vm-memory hands
    // out no Rust references to guest memory.
    unsafe { slots.insert(gpa, host, false) }.map_err(|source| MemoryError::Slot { gpa, source })
}

#[cfg(test)]
pub(crate) mod tests {
    use carom_api::{Explain, Terms};
    use vm_memory::{Bytes, FileOffset};

    use super::*;
    use crate::arch::layout::{GIB, MIB, boot_ram, ram_ranges};

    /// Size of huge pages, which shorten the page tables of the host, of KVM and of the IOMMU.
    const HUGE_PAGE: u64 = 2 * MIB;

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
        // The test creates RAM repeatedly, because each mapping changes where the next mapping is placed.
        let kept: Vec<_> = (0..4).map(|_| create(&MemoryConfig::with_size(64 * MIB)).unwrap()).collect();
        for memory in &kept {
            let region = memory.iter().next().unwrap();
            assert_eq!(region.as_ptr() as u64 % HUGE_PAGE, 0);
        }
    }

    #[test]
    fn only_prefaulted_ram_is_resident_at_once() {
        for prefault in [false, true] {
            let memory = create(&MemoryConfig { prefault, ..MemoryConfig::with_size(64 * MIB) }).unwrap();
            let there = resident(memory.iter().next().unwrap());
            assert_eq!(there, if prefault { 64 * MIB } else { 0 });
        }
    }

    /// Returns the number of resident bytes of the region's mapping.
    fn resident(region: &RamRegion) -> u64 {
        said_by_smaps(region, "Rss:").trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }

    /// Returns the value of `key` in `/proc/self/smaps` for the mapping of `region`. The value also covers neighbouring mappings if the
    /// kernel has merged them with this mapping.
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
    fn region_added_later_is_of_the_same_kind() {
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

    fn zoned(zones: &[&str]) -> MemoryConfig {
        let zones = zones.iter().map(|zone| zone.parse().unwrap()).collect();
        MemoryConfig { size: 0, zones, ..MemoryConfig::default() }
    }

    #[test]
    fn zones_are_regions_one_after_the_other() {
        let config = zoned(&["id=a,size=1G", "id=b,size=3G,shared=on", "id=c,size=2M"]);
        let wanted = [(0, GIB), (GIB, 2 * GIB), (4 * GIB, GIB), (5 * GIB, 2 * MIB)];
        assert_eq!(boot_ram(&config), wanted);
        let memory = create(&config).unwrap();
        let of = |region: &RamRegion| (region.start_addr().0, region.len());
        assert_eq!(memory.iter().map(of).collect::<Vec<_>>(), wanted);
        // Both parts of a zone are in the same file.
        let places = memory.iter().map(|region| region.file_offset().map(FileOffset::start));
        assert_eq!(places.collect::<Vec<_>>(), [None, Some(0), Some(2 * GIB), None]);
        // A write across the end of a zone changes both zones.
        memory.write_slice(&[7; 8], GuestAddress(GIB - 4)).unwrap();
        assert_eq!(memory.read_obj::<u64>(GuestAddress(GIB - 4)).unwrap(), 0x0707_0707_0707_0707);
        assert_eq!(boot_ram(&MemoryConfig::with_size(5 * GIB)), ram_ranges(5 * GIB));
    }

    #[test]
    fn only_a_shared_zone_writes_to_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ram");
        for shared in [true, false] {
            std::fs::write(&path, [5; 64]).unwrap();
            std::fs::File::options().write(true).open(&path).unwrap().set_len(4 * MIB).unwrap();
            let on = if shared { "on" } else { "off" };
            let config = zoned(&["id=a,size=32M", &format!("id=b,size=4M,file={},shared={on}", path.display())]);
            let memory = create(&config).unwrap();
            let start = GuestAddress(32 * MIB);
            assert_eq!(memory.read_obj::<[u8; 2]>(start).unwrap(), [5; 2], "RAM starts with the file's contents");
            memory.write_obj(9u8, start).unwrap();
            assert_eq!(std::fs::read(&path).unwrap()[..2], [if shared { 9 } else { 5 }, 5]);
            // A private region must have no file. Otherwise returning a page of the region to the host would punch a hole in the file.
            assert_eq!(memory.find_region(start).unwrap().file_offset().is_some(), shared);
        }
        let made = create(&zoned(&[&format!("id=a,size=32M,file={}", dir.path().display())])).unwrap();
        assert_eq!(made.read_obj::<u64>(GuestAddress(0)).unwrap(), 0);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "a file made in the directory has no name");
    }

    #[test]
    fn file_that_cannot_hold_a_zone_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ram");
        std::fs::write(&path, [0; 100]).unwrap();
        let refused = |path: &std::path::Path| {
            let zone = format!("id=a,size=32M,file={}", path.display());
            let error = create(&zoned(&[&zone])).unwrap_err();
            assert!(error.is_user_error());
            error.explain(Terms::Json)
        };
        let name = |path: &std::path::Path| format!("memory.zones.file: {}: ", path.display());
        assert_eq!(
            refused(&path),
            name(&path)
                + "has 100 bytes, fewer than the zone's 33554432 bytes: enlarge the file, or make the zone smaller"
        );
        let missing = dir.path().join("missing");
        assert_eq!(refused(&missing), name(&missing) + "No such file or directory (os error 2)");
        let null = std::path::Path::new("/dev/null");
        assert_eq!(refused(null), name(null) + "is neither a regular file nor a directory");
    }

    #[test]
    fn reserved_shared_memory_is_allocated_without_mapping_pages() {
        for reserve in [false, true] {
            let memory = create(&MemoryConfig { reserve, shared: true, ..MemoryConfig::with_size(32 * MIB) }).unwrap();
            let region = memory.iter().next().unwrap();
            let blocks =
                std::os::unix::fs::MetadataExt::blocks(&region.file_offset().unwrap().file().metadata().unwrap());
            assert_eq!((blocks * 512, resident(region)), (if reserve { 32 * MIB } else { 0 }, 0));
            let private = create(&MemoryConfig { reserve, ..MemoryConfig::with_size(32 * MIB) }).unwrap();
            let flags = said_by_smaps(private.iter().next().unwrap(), "VmFlags:");
            assert_eq!(flags.split(' ').any(|flag| flag == "nr"), !reserve, "{flags}");
        }
    }
}

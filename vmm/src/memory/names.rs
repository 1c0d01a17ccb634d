// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Names of RAM regions for messages about lost pages.

use std::path::Path;

use carom_api::config::MemoryZoneConfig;
use devices::host_memory::{Origin, Supply, register};
use devices::platform::HostRange;
use devices::ram::{Ram, RamRegion};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

/// Registers a name for a region of `ram`. The name contains the ID of the region's zone. If `path` is set, the name also contains this
/// path. The region maps the file from `offset` on.
fn keep_name(ram: &Ram, region: &RamRegion, zone: &MemoryZoneConfig, path: Option<&Path>, offset: u64) {
    let (memory, supply) = match path {
        Some(path) => (format!("file {}", path.display()), Supply::File),
        None if zone.hugepages => ("reserved huge pages".into(), Supply::HugePages),
        None => ("memory of the host".into(), Supply::Memory),
    };
    let origin = Origin {
        name: format!("zone '{}', {memory}", zone.id),
        supply,
        file: region.file_offset().map(|file| file.arc().clone()),
        offset,
        gpa: Some(region.start_addr().0),
    };
    let range = HostRange { address: region.as_ptr() as usize, len: region.size() };
    ram.keep_name(register(range, origin));
}

/// Names the `count` regions of a new zone. The first of these regions has the index `first` in `ram`.
pub(super) fn keep_of_zone(ram: &Ram, first: usize, count: usize, zone: &MemoryZoneConfig) {
    let mut offset = 0;
    for region in ram.iter().skip(first).take(count) {
        keep_name(ram, region, zone, zone.file.as_deref(), offset);
        offset += region.len();
    }
}

/// Names a region that maps the file of a snapshot. `offset` is the position of the region's first byte in the file.
pub fn keep_of_restored(ram: &Ram, region: &RamRegion, zone: &MemoryZoneConfig, file: &Path, offset: u64) {
    keep_name(ram, region, zone, Some(file), offset);
}

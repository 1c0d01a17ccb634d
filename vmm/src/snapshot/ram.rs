// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! RAM of a snapshot.

use std::io;
use std::sync::Arc;

use carom_api::config::MemoryZoneConfig;
use devices::ram::{Ram, RamRegion};
use devices::state::StateError;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::retry_on_intr;
use vm_memory::{Address, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use super::directory::Snapshot;
use super::ram_file::{RamFile, RamFileWriter};
use super::{RamRange, SnapshotError};
use crate::memory;

/// Writes these ranges of RAM, of one region each; says where in the file they stand.
///
/// # Errors
/// What the kernel said.
pub fn write(ram: &Ram, ranges: &[(u64, u64)], file: &mut RamFileWriter) -> io::Result<Vec<RamRange>> {
    let write = |&(gpa, len): &(u64, u64)| {
        let bytes = usize::try_from(len).map_err(io::Error::other)?;
        let all = ram.get_slice(GuestAddress(gpa), bytes).map_err(io::Error::other)?;
        let shared = ram
            .to_region_addr(GuestAddress(gpa))
            .and_then(|(region, at)| region.file_offset().map(|place| (place.file(), place.start() + at.raw_value())));
        let offset = match shared {
            Some((memory, start)) => file.append_file(memory, start, bytes)?,
            None => file.append(&all)?,
        };
        Ok(RamRange { gpa, len, offset })
    };
    ranges.iter().map(write).collect()
}

/// Makes RAM with the bytes of `snapshot`. Private memory is read from the file page by page, when the guest or a device touches
/// it, unless `prefault`: the file must stay as it is for the life of the VM. All other memory is copied. The guest was booted with
/// `ram_size` bytes of it.
///
/// # Errors
/// The RAM could not be made, or the file not be read.
pub fn restore(snapshot: &Snapshot, ram_size: u64, prefault: bool) -> Result<Arc<Ram>, SnapshotError> {
    let config = snapshot.config.memory.booted_with(ram_size);
    let ram = memory::create(&config)?;
    for added in &snapshot.state.added_ram {
        let region = memory::region(&config, added.gpa, added.len)?;
        ram.add(region).map_err(|error| StateError::rule("added_ram", error.to_string()))?;
    }
    let zones = memory::zones(&config);
    let of_regions = zones.iter().flat_map(|(zone, ranges)| ranges.iter().map(move |_| zone));
    // What came while the guest ran is like the one zone that there is then.
    let zone_of = |index: usize| of_regions.clone().nth(index).or(zones.last().map(|(zone, _)| zone));
    let saved = snapshot.state.ram.iter().chain(&snapshot.state.added_ram);
    for (index, (region, saved)) in ram.iter().zip(saved).enumerate() {
        let zone = zone_of(index).ok_or_else(|| StateError::rule("ram", "is in no zone"))?;
        let read = fill(region, zone, snapshot, saved.offset, prefault);
        if read.map_err(|error| snapshot.memory_error(error))? {
            memory::keep_of_restored(&ram, region, zone, &snapshot.memory_path(), saved.offset);
        }
        if let Some(node) = zone.host_numa_node {
            memory::hold_to_node(region, node)?;
        }
    }
    Ok(ram)
}

/// Gives a region that was just made its bytes. True if they come from the snapshot's file when they are touched.
fn fill(
    region: &RamRegion,
    zone: &MemoryZoneConfig,
    snapshot: &Snapshot,
    offset: u64,
    prefault: bool,
) -> io::Result<bool> {
    let from_file = zone.file.is_some();
    match region.file_offset() {
        // Holes are not read: what a file had before must not show there.
        Some(place) if from_file => {
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            retry_on_intr(|| fallocate(place.file(), flags, place.start(), region.len()))?;
        }
        None if from_file || !prefault => {
            map_lazily(region, &snapshot.memory, offset, zone.reserve)?;
            if prefault {
                memory::populate(region)?;
            }
            return Ok(true);
        }
        _ => {}
    }
    let all = region.as_volatile_slice().map_err(io::Error::other)?;
    snapshot.memory.read(offset, &all).map(|()| false)
}

/// Has the bytes of a region come from `file`, from `offset` on, when they are touched.
fn map_lazily(region: &RamRegion, file: &RamFile, offset: u64, reserve: bool) -> io::Result<()> {
    let end = offset.checked_add(region.len()).ok_or(io::ErrorKind::InvalidInput)?;
    if end > file.size()? {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    memory::map_privately(region, file, offset, reserve)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};

    use carom_api::config::MemoryConfig;
    use vm_memory::Bytes;

    use super::*;

    const LEN: u64 = 64 << 20;

    #[test]
    fn shared_ram_that_the_guest_does_not_use_takes_no_memory_when_it_is_written() {
        let ram = memory::create(&MemoryConfig { shared: true, ..MemoryConfig::with_size(LEN) }).unwrap();
        ram.write_obj(7_u8, GuestAddress(LEN / 2 + 5)).unwrap();
        let file = tempfile::tempfile().unwrap();
        let mut writer = RamFileWriter::new(file.try_clone().unwrap());

        let ranges = write(&ram, &[(LEN / 2, LEN / 2), (0, 4096)], &mut writer).unwrap();

        let offsets: Vec<u64> = ranges.iter().map(|range| range.offset).collect();
        assert_eq!(offsets, [0, LEN / 2]);
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes, [0, 0, 0, 0, 0, 7, 0, 0]);
        let region = ram.iter().next().unwrap();
        let taken = region.file_offset().unwrap().file().metadata().unwrap().blocks() * 512;
        assert!(taken < 1 << 20, "{taken} bytes");
    }
}

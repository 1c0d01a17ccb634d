// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Saves and restores RAM.

use std::io;
use std::sync::Arc;

use carom_api::config::MemoryZoneConfig;
use devices::ram::{Ram, RamRegion};
use devices::state::StateError;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::retry_on_intr;
use vm_memory::{Address, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use super::{MemoryFile, RamRange, StateSink, StateSource, VmStateError};
use crate::arch::layout::zone_ranges;
use crate::memory;

/// Writes these ranges of RAM to `sink`. Each range must be one region. Returns the ranges with their offsets in the saved memory contents.
///
/// # Errors
/// A range is not RAM, or its bytes cannot be written.
pub fn write(ram: &Ram, ranges: &[(u64, u64)], sink: &mut dyn StateSink) -> Result<Vec<RamRange>, VmStateError> {
    let write = |&(gpa, len): &(u64, u64)| {
        let bytes = usize::try_from(len).map_err(|_| StateError::rule("ram", "is longer than this process can map"))?;
        let all =
            ram.get_slice(GuestAddress(gpa), bytes).map_err(|error| StateError::rule("ram", error.to_string()))?;
        let shared = ram
            .to_region_addr(GuestAddress(gpa))
            .and_then(|(region, at)| region.file_offset().map(|place| (place.file(), place.start() + at.raw_value())));
        let offset = match shared {
            Some((memory, start)) => sink.append_file(memory, start, bytes)?,
            None => sink.append(&all)?,
        };
        Ok(RamRange { gpa, len, offset })
    };
    ranges.iter().map(write).collect()
}

/// Creates RAM with the contents of `source`. The guest was booted with `ram_size` bytes of RAM. If `prefault` is set, all pages are read
/// now.
///
/// If `source` has a file, private memory is mapped from the file. Then each page is read when the guest or a device touches it, and the
/// file must not change while the VM runs. All other memory is copied. With `prefault`, private memory is mapped only if its zone has a
/// file of its own.
///
/// # Errors
/// RAM cannot be allocated, or its bytes cannot be read.
pub fn restore(source: &dyn StateSource, ram_size: u64, prefault: bool) -> Result<Arc<Ram>, VmStateError> {
    let config = source.config().memory.booted_with(ram_size);
    let state = source.state();
    let ram = memory::create(&config)?;
    for added in &state.added_ram {
        let region = memory::region(&config, added.gpa, added.len)?;
        ram.add(region).map_err(|error| StateError::rule("added_ram", error.to_string()))?;
    }
    let zones = zone_ranges(&config);
    let of_regions = zones.iter().flat_map(|(zone, ranges)| ranges.iter().map(move |_| zone));
    // A VM to which RAM was added has a single zone. The added RAM has the settings of this zone.
    let zone_of = |index: usize| of_regions.clone().nth(index).or(zones.last().map(|(zone, _)| zone));
    let saved = state.ram.iter().chain(&state.added_ram);
    for (index, (region, saved)) in ram.iter().zip(saved).enumerate() {
        let zone = zone_of(index).ok_or_else(|| StateError::rule("ram", "a range of RAM belongs to no memory zone"))?;
        if let Some(MemoryFile { path, .. }) = fill(region, zone, source, saved.offset, prefault)? {
            memory::keep_of_restored(&ram, region, zone, path, saved.offset);
        }
        if let Some(node) = zone.host_numa_node {
            memory::hold_to_node(region, node)?;
        }
    }
    Ok(ram)
}

/// Fills a new region with its saved contents. Returns the file of `source` if the region maps this file.
fn fill<'s>(
    region: &RamRegion,
    zone: &MemoryZoneConfig,
    source: &'s dyn StateSource,
    offset: u64,
    prefault: bool,
) -> Result<Option<MemoryFile<'s>>, VmStateError> {
    let is_shared = region.file_offset().is_some();
    if let Some(file) = source.file().filter(|_| !is_shared && (zone.file.is_some() || !prefault)) {
        map_lazily(region, &file, offset, zone.reserve, prefault)?;
        return Ok(Some(file));
    }
    let all = region.as_volatile_slice().map_err(|error| StateError::rule("ram", error.to_string()))?;
    if let Some(path) = &zone.file {
        clear(region).map_err(|source| VmStateError::File { path: path.display().to_string(), source })?;
    }
    source.read(offset, &all).map(|()| None)
}

/// Clears the region. Otherwise the previous contents of the zone's file would stay where the source has holes.
fn clear(region: &RamRegion) -> io::Result<()> {
    let Some(place) = region.file_offset() else {
        const ZEROS: [u8; 4096] = [0; 4096];
        let all = region.as_volatile_slice().map_err(io::Error::other)?;
        for at in (0..all.len()).step_by(ZEROS.len()) {
            all.offset(at).map_err(io::Error::other)?.copy_from(&ZEROS[..]);
        }
        return Ok(());
    };
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(retry_on_intr(|| fallocate(place.file(), flags, place.start(), region.len()))?)
}

/// Maps the region's bytes from `file`, starting at `offset`. Each page is read on its first access. If `prefault` is set, all pages are
/// read now.
fn map_lazily(
    region: &RamRegion,
    file: &MemoryFile<'_>,
    offset: u64,
    reserve: bool,
    prefault: bool,
) -> Result<(), VmStateError> {
    if offset.checked_add(region.len()).is_none_or(|end| end > file.len) {
        return Err(file.error(io::ErrorKind::UnexpectedEof.into()));
    }
    memory::map_privately(region, &file.file, offset, reserve).map_err(|error| file.error(error))?;
    if prefault { memory::populate(region).map_err(|error| file.error(error)) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::{FileExt, MetadataExt};
    use std::path::Path;

    use carom_api::VmConfig;
    use carom_api::config::MemoryConfig;
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    use serde_json::json;
    use vm_memory::Bytes;

    use super::*;
    use crate::arch::saved::ProcessorsState;
    use crate::snapshot::NewSnapshot;
    use crate::vm_state::in_memory::{InMemorySink, InMemorySource};
    use crate::vm_state::{VERSION, VmState};

    const LEN: u64 = 64 << 20;

    #[test]
    fn saving_shared_ram_allocates_no_memory_for_unused_pages() {
        let ram = memory::create(&MemoryConfig { shared: true, ..MemoryConfig::with_size(LEN) }).unwrap();
        ram.write_obj(7_u8, GuestAddress(LEN / 2 + 5)).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let mut sink = NewSnapshot::create(dir.path()).unwrap();

        let ranges = write(&ram, &[(LEN / 2, LEN / 2), (0, 4096)], &mut sink).unwrap();

        let offsets: Vec<u64> = ranges.iter().map(|range| range.offset).collect();
        assert_eq!(offsets, [0, LEN / 2]);
        let mut bytes = [0; 8];
        File::open(dir.path().join("memory-ranges")).unwrap().read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes, [0, 0, 0, 0, 0, 7, 0, 0]);
        let region = ram.iter().next().unwrap();
        let taken = region.file_offset().unwrap().file().metadata().unwrap().blocks() * 512;
        assert!(taken < 1 << 20, "{taken} bytes");
    }

    /// Returns the saved state of a VM whose RAM is one zone with the file at `path`. The byte at `LEN / 2` is 7, and all other bytes are
    /// zero.
    fn saved(path: &Path, shared: bool) -> InMemorySource {
        let zone = json!({"id": "z", "size": LEN, "file": path, "shared": shared});
        let config = json!({"payload": {"kernel": "/k"}, "memory": {"size": 0, "zones": [zone]}});
        let config = serde_json::from_value::<VmConfig>(config).unwrap().check().unwrap();
        let ram = memory::create(&MemoryConfig::with_size(LEN)).unwrap();
        ram.write_obj(7_u8, GuestAddress(LEN / 2)).unwrap();
        let mut sink = InMemorySink::default();
        let state = VmState {
            version: VERSION,
            processors: ProcessorsState::example(1),
            platform: vec![],
            functions: vec![],
            ram: write(&ram, &[(0, LEN)], &mut sink).unwrap(),
            added_ram: vec![],
            windows: vec![],
            window_aperture: None,
            generation_id: None,
        };
        sink.finish(&config, &state).unwrap();
        sink.into_source().unwrap()
    }

    #[test]
    fn private_zone_restored_from_memory_hides_its_files_bytes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(LEN).unwrap();
        for at in [0, LEN / 2, LEN - 4096] {
            file.as_file().write_all_at(&[0xff; 4096], at).unwrap();
        }
        for prefault in [false, true] {
            let ram = restore(&saved(file.path(), false), LEN, prefault).unwrap();
            let byte = |at| ram.read_obj::<u8>(GuestAddress(at)).unwrap();
            assert_eq!([0, LEN / 2, LEN / 2 + 1, LEN - 1].map(byte), [0, 7, 0, 0]);
            let mut bytes = [0; 8];
            file.as_file().read_exact_at(&mut bytes, LEN / 2).unwrap();
            assert_eq!(bytes, [0xff; 8], "the file is only read");
        }
    }

    #[test]
    fn zone_whose_file_cannot_be_cleared_is_named() {
        let file = memfd_create("zone", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, LEN).unwrap();
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let source = saved(path.as_ref(), true);
        let ram = memory::create(&source.config().memory).unwrap();
        // The existing mapping stays writable, but clearing the file fails.
        fcntl_add_seals(&file, SealFlags::FUTURE_WRITE).unwrap();
        let zone = source.config().memory.all_zones().remove(0);
        let error = fill(ram.iter().next().unwrap(), &zone, &source, 0, false).err().unwrap();
        assert_eq!(error.to_string(), format!("{path}: Operation not permitted (os error 1)"));
        assert!(error.is_user_error());
    }
}

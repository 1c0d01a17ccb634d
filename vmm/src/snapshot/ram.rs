// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! RAM of a snapshot.

use std::io;
use std::sync::Arc;

use carom_api::config::MemoryConfig;
use devices::ram::{Ram, RamRegion};
use devices::state::StateError;
use log::debug;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

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
        Ok(RamRange { gpa, len, offset: file.append(&all)? })
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
    let config = MemoryConfig { size: ram_size, ..snapshot.config.memory.clone() };
    let ram = memory::create(&config)?;
    for added in &snapshot.state.added_ram {
        let region = memory::region(&config, added.gpa, added.len)?;
        ram.add(region).map_err(|error| StateError::rule("added_ram", error.to_string()))?;
    }
    for (region, saved) in ram.iter().zip(snapshot.state.ram.iter().chain(&snapshot.state.added_ram)) {
        let read = if prefault || region.file_offset().is_some() {
            let all = region.as_volatile_slice().map_err(io::Error::other);
            all.and_then(|all| snapshot.memory.read(saved.offset, &all))
        } else {
            map_lazily(region, &snapshot.memory, saved.offset)
        };
        read.map_err(|error| snapshot.memory_error(error))?;
    }
    Ok(ram)
}

/// Puts the bytes of `file` from `offset` on in the place of a region's, which nobody uses yet. What is written to the region
/// does not reach the file.
fn map_lazily(region: &RamRegion, file: &RamFile, offset: u64) -> io::Result<()> {
    let end = offset.checked_add(region.len()).ok_or(io::ErrorKind::InvalidInput)?;
    if end > file.size()? {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
    // SAFETY: The range is the region's own, which was just made, so that nobody has a reference to its bytes. It stays mapped,
    // and the region unmaps it as it would have unmapped what was there.
    unsafe { mmap(region.as_ptr().cast(), region.size(), access, flags, file, offset) }?;
    // SAFETY: The range was just mapped; the advice changes neither its bytes nor its access.
    if let Err(error) = unsafe { madvise(region.as_ptr().cast(), region.size(), Advice::LinuxDontDump) } {
        debug!("guest RAM will be in core dumps: {error}");
    }
    Ok(())
}

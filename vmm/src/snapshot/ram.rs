// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! RAM of a snapshot.

use std::io;
use std::sync::Arc;

use devices::ram::{Ram, RamRegion};
use rustix::mm::{MapFlags, ProtFlags, mmap};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use super::directory::Snapshot;
use super::ram_file::{RamFile, RamFileWriter};
use super::{RamRange, SnapshotError};
use crate::memory;

/// Writes all RAM; says where in the file it stands.
///
/// # Errors
/// What the kernel said.
pub fn write(ram: &Ram, file: &mut RamFileWriter) -> io::Result<Vec<RamRange>> {
    let write = |region: &RamRegion| {
        let all = region.as_volatile_slice().map_err(io::Error::other)?;
        Ok(RamRange { gpa: region.start_addr().0, len: region.len(), offset: file.append(&all)? })
    };
    ram.iter().map(write).collect()
}

/// Makes RAM with the bytes of `snapshot`. Private memory is read from the file page by page, when the guest or a device touches
/// it, unless `prefault`: the file must stay as it is for the life of the VM. All other memory is copied.
///
/// # Errors
/// The RAM could not be made, or the file not be read.
pub fn restore(snapshot: &Snapshot, prefault: bool) -> Result<Arc<Ram>, SnapshotError> {
    let ram = memory::create(&snapshot.config.memory)?;
    for (region, saved) in ram.iter().zip(&snapshot.state.ram) {
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
    Ok(())
}

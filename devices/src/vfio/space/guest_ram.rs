// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guest RAM in an address space of the host, for devices that are behind no virtual IOMMU.

use std::io;

use iommu_bounce::Permissions;
use log::error;
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion, VolatileSlice};

use super::dma_space::DmaSpace;
use crate::ram::Ram;
use crate::vfio::error::VfioPciError;

/// Guest RAM mapped in an address space, each address at itself, until this is dropped.
pub struct GuestRamMapping {
    space: DmaSpace,
    memory: Ram,
    /// How many of the memory's regions are mapped.
    mapped: usize,
}

/// Maps all of `memory` in `space`, IOVA equal to GPA, readable and writable, as devices without a virtual IOMMU
/// need. A device must be attached to `space` already. All of the memory is pinned.
pub fn map_guest_ram(space: &DmaSpace, memory: &Ram) -> Result<GuestRamMapping, VfioPciError> {
    let mut mapping = GuestRamMapping { space: space.clone(), memory: memory.clone(), mapped: 0 };
    for region in memory.iter() {
        let slice = region.as_volatile_slice().map_err(io::Error::other);
        let result = slice.and_then(|slice: VolatileSlice<'_, _>| {
            let everything = Permissions::READ | Permissions::WRITE;
            space.map(region.start_addr().raw_value(), &slice, everything)
        });
        result.map_err(|source| map_error(region.start_addr().raw_value(), region.len(), source))?;
        mapping.mapped += 1;
    }
    Ok(mapping)
}

fn map_error(gpa: u64, len: u64, source: io::Error) -> VfioPciError {
    let hint = match source.raw_os_error() {
        Some(libc::ENOMEM) => {
            " (all guest RAM is pinned: raise the limit on locked memory, ulimit -l, or turn iommu on)"
        }
        _ => "",
    };
    VfioPciError::Host { what: format!("mapping {len:#x} bytes of guest RAM at {gpa:#x} for DMA{hint}"), source }
}

impl Drop for GuestRamMapping {
    fn drop(&mut self) {
        for region in self.memory.iter().take(self.mapped) {
            let (start, len) = (region.start_addr().raw_value(), region.len());
            match self.space.unmap(start, len) {
                Ok(done) if done == len => {}
                Ok(done) => error!("VFIO unmapped {done:#x} bytes of {len:#x} of guest RAM at {start:#x}"),
                // The container's last device is closed and its address space gone.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
                Err(error) => error!("unmapping guest RAM at {start:#x}: {error}"),
            }
        }
    }
}

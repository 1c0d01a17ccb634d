// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guest RAM in a host address space, for devices that are not behind a virtual IOMMU.

use std::io;
use std::sync::{Arc, Mutex};

use iommu_bounce::Permissions;
use log::error;
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion, VolatileSlice};

use super::dma_space::DmaSpace;
use crate::ram::{Ram, RamRegion};
use crate::sync::lock;
use crate::vfio::error::VfioPciError;

/// Guest RAM mapped in an address space, with IOVA equal to GPA. Dropping this value unmaps the RAM.
pub struct GuestRamMapping {
    space: DmaSpace,
    /// Keeps the mapped RAM alive.
    _memory: Arc<Ram>,
    /// Address and length of each region that is mapped.
    mapped: Mutex<Vec<(u64, u64)>>,
}

/// Maps all of `memory` in `space`, for devices without a virtual IOMMU. The memory is readable and writable, with IOVA equal to GPA. A
/// device must be attached to `space` already. All of the memory is pinned.
pub fn map_guest_ram(space: &DmaSpace, memory: &Arc<Ram>) -> Result<GuestRamMapping, VfioPciError> {
    let mapping = GuestRamMapping { space: space.clone(), _memory: memory.clone(), mapped: Mutex::default() };
    memory.iter().try_for_each(|region| mapping.add(region))?;
    Ok(mapping)
}

impl GuestRamMapping {
    /// Maps and pins another region of the same RAM, unless the region is mapped already.
    ///
    /// # Errors
    /// The kernel cannot map the region.
    pub fn add(&self, region: &RamRegion) -> Result<(), VfioPciError> {
        let (gpa, len) = (region.start_addr().raw_value(), region.len());
        let mut mapped = lock(&self.mapped);
        if mapped.contains(&(gpa, len)) {
            return Ok(());
        }
        let slice = region.as_volatile_slice().map_err(io::Error::other);
        let result = slice.and_then(|slice: VolatileSlice<'_, _>| {
            self.space.map(gpa, &slice, Permissions::READ | Permissions::WRITE)
        });
        result.map_err(|source| map_error(gpa, len, source))?;
        mapped.push((gpa, len));
        Ok(())
    }

    /// Unmaps a region if it is mapped.
    pub fn remove(&self, region: &RamRegion) {
        let range = (region.start_addr().raw_value(), region.len());
        let mut mapped = lock(&self.mapped);
        if mapped.contains(&range) {
            mapped.retain(|other| *other != range);
            self.unmap(range);
        }
    }

    fn unmap(&self, (start, len): (u64, u64)) {
        match self.space.unmap(start, len) {
            Ok(done) if done == len => {}
            Ok(done) => error!("VFIO unmapped only {done:#x} of {len:#x} bytes of guest RAM at address {start:#x}"),
            // The container's last device is closed, so the kernel's address space no longer exists.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            Err(error) => error!("VFIO cannot unmap guest RAM at {start:#x}: {error}"),
        }
    }
}

fn map_error(gpa: u64, len: u64, source: io::Error) -> VfioPciError {
    let hint = match source.raw_os_error() {
        Some(libc::ENOMEM) => {
            " (a device without iommu=on pins all guest RAM: set iommu=on, or raise the limit on locked memory with ulimit -l)"
        }
        _ => "",
    };
    VfioPciError::Host { what: format!("cannot map {len:#x} bytes of guest RAM at {gpa:#x} for DMA{hint}"), source }
}

impl Drop for GuestRamMapping {
    fn drop(&mut self) {
        let mapped = std::mem::take(&mut *lock(&self.mapped));
        mapped.into_iter().for_each(|range| self.unmap(range));
    }
}

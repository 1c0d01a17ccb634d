// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Memory that a device can access.

use std::sync::Arc;

use iommu_bounce::Permissions;
use vm_memory::{GuestAddress, GuestMemoryBackend};

use super::host_io::{HostIo, HostRanges, IoOwner};
use super::table::DmaTable;
use super::view::DmaView;
use crate::platform::HostRange;
use crate::ram::Ram;

/// Memory that a device can access. A device behind the virtio-iommu can access only the mappings of its domain, and its addresses are
/// IOVAs. Any other device can access all guest RAM, and its addresses are guest-physical addresses. All clones share the mappings.
#[derive(Clone)]
pub struct DeviceMemory {
    ram: Arc<Ram>,
    table: Option<Arc<DmaTable>>,
}

impl DeviceMemory {
    /// Returns all guest RAM, for a device that is not behind the virtio-iommu.
    pub fn all_ram(ram: Arc<Ram>) -> Self {
        Self { ram, table: None }
    }

    /// Returns the memory that `table` maps, for a device behind the virtio-iommu.
    pub fn mapped(table: Arc<DmaTable>) -> Self {
        Self { ram: table.ram().clone(), table: Some(table) }
    }

    /// True if the device's addresses are IOVAs.
    pub fn is_translated(&self) -> bool {
        self.table.is_some()
    }

    /// Returns a view of the memory for a short piece of work. An UNMAP waits until the view is dropped. So the holder of a view must not
    /// wait for anything, and a thread must not hold two views.
    pub fn view(&self) -> DmaView<'_> {
        DmaView::new(&self.ram, self.table.as_deref())
    }

    /// Prepares I/O of the host kernel in the ranges `parts` (address and length). The result lists the memory of these ranges in the same
    /// order. `owner` runs the operation, and must drop the [`HostIo`] when the operation has ended.
    ///
    /// Returns `None` if part of the access is not allowed. Behind the virtio-iommu, a denied access is reported to the driver.
    pub fn begin_io(
        &self,
        parts: &[(u64, usize)],
        access: Permissions,
        owner: &Arc<impl IoOwner + 'static>,
    ) -> Option<HostIo> {
        if let Some(table) = &self.table {
            return table.begin_io(parts, access, owner);
        }
        let mut ranges = HostRanges::with_capacity(parts.len());
        for (address, len) in parts.iter().filter(|(_, len)| *len != 0) {
            for slice in GuestMemoryBackend::get_slices(&*self.ram, GuestAddress(*address), *len) {
                let slice = slice.ok()?;
                ranges.push(HostRange { address: slice.ptr_guard().as_ptr().expose_provenance(), len: slice.len() });
            }
        }
        Some(HostIo::new(ranges, None))
    }

    /// Returns all guest RAM, even if the device is behind the virtio-iommu. Accesses to the returned RAM are not translated.
    pub fn ram(&self) -> &Arc<Ram> {
        &self.ram
    }
}

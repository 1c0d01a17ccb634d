// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a device sees of memory.

use std::sync::Arc;

use iommu_bounce::Permissions;
use vm_memory::{GuestAddress, GuestMemoryBackend};

use super::host_io::{HostIo, HostRanges, IoOwner};
use super::table::DmaTable;
use super::view::DmaView;
use crate::platform::HostRange;
use crate::ram::Ram;

/// What a device sees of memory: all guest RAM, or what its domain maps. Its addresses are guest-physical ones in the first
/// case and IOVAs in the second. Clones see the same.
#[derive(Clone)]
pub struct DeviceMemory {
    ram: Arc<Ram>,
    table: Option<Arc<DmaTable>>,
}

impl DeviceMemory {
    /// All guest RAM: for a device that is not behind the virtio-iommu.
    pub fn all_ram(ram: Arc<Ram>) -> Self {
        Self { ram, table: None }
    }

    /// What `table` maps: for a device behind the virtio-iommu.
    pub fn mapped(table: Arc<DmaTable>) -> Self {
        Self { ram: table.ram().clone(), table: Some(table) }
    }

    /// Whether addresses are IOVAs.
    pub fn is_translated(&self) -> bool {
        self.table.is_some()
    }

    /// The memory for one piece of work. An UNMAP waits until it is dropped: nothing may be waited for meanwhile, and a
    /// thread has one of them at a time.
    pub fn view(&self) -> DmaView<'_> {
        DmaView::new(&self.ram, self.table.as_deref())
    }

    /// Has the host's kernel access these addresses and lengths, in this order; `None` if not all of it is allowed, which
    /// is reported to the driver. `owner` runs the operation, and must drop the [`HostIo`] when it has ended.
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

    /// Guest RAM itself, for the virtio-iommu, which is behind nothing.
    pub fn ram(&self) -> &Arc<Ram> {
        &self.ram
    }
}

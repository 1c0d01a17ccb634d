// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! I/O address space of an emulated device behind the virtio-iommu.

use std::ops::Deref;
use std::sync::Arc;

use iommu_bounce::{DmaMapper, MapError, MapperLimits, Permissions, UnmapError};
use vm_memory::VolatileSlice;

use super::table::DmaTable;
use crate::guest_visible::GuestVisibleMemory;
use crate::windows::WindowMemory;

/// Returns the mapping limits of a device whose accesses go through a [`DmaTable`].
pub(crate) fn table_limits() -> MapperLimits {
    // The granule is the guest's smallest page size. IOVAs have 48 bits, as in the I/O page tables of most hosts. So emulated devices and
    // host devices usually have the same IOVA range.
    MapperLimits { page_size_mask: !0xfff, iova_ranges: vec![0..=(1 << 48) - 1], max_mappings: None }
}

/// Table that a mapper fills. The mapper is dropped when its endpoint is removed. The table is then cleared, so that the device can no
/// longer access memory.
pub(crate) struct MapperTable(pub(crate) Arc<DmaTable>);

impl Deref for MapperTable {
    type Target = DmaTable;

    fn deref(&self) -> &DmaTable {
        &self.0
    }
}

impl Drop for MapperTable {
    fn drop(&mut self) {
        self.0.clear();
    }
}

/// Mapper that fills the table of an emulated device.
///
/// When an UNMAP has succeeded, no copy and no I/O in the range is in progress. If I/O of the host kernel does not end in time, the UNMAP
/// fails, and the device can make no new access to the range.
pub struct TableMapper {
    table: MapperTable,
}

impl TableMapper {
    /// Returns the mapper that fills `table`. Each table must have only one mapper.
    pub fn new(table: Arc<DmaTable>) -> Self {
        Self { table: MapperTable(table) }
    }

    /// Connects the table with windows and with devices whose memory can be mapped. Call this function before you pass the mapper to the
    /// virtio-iommu. See [`DmaTable::connect`].
    pub fn connect(&self, windows: Option<&Arc<WindowMemory>>, devices: Option<&Arc<GuestVisibleMemory>>) {
        self.table.connect(windows, devices);
    }
}

impl DmaMapper for TableMapper {
    fn map(&mut self, iova: u64, memory: VolatileSlice<'_>, permissions: Permissions) -> Result<(), MapError> {
        self.table.insert_slice(iova, &memory, permissions).map(drop)
    }

    fn unmap(&mut self, iova: u64, len: u64) -> Result<(), UnmapError> {
        Ok(self.table.remove(iova, len, |_, _| {})?)
    }

    /// Returns false, because the table refers to the chunk's address in this process. While the chunk is parked, other memory is mapped at
    /// this address.
    fn keeps_page_tables(&self) -> bool {
        false
    }

    fn maps_hidden_chunks(&self) -> bool {
        false
    }

    fn limits(&self) -> MapperLimits {
        table_limits()
    }
}

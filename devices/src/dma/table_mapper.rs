// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The I/O address space of an emulated device behind the virtio-iommu.

use std::ops::Deref;
use std::sync::Arc;

use iommu_bounce::{DmaMapper, MapError, MapperLimits, Permissions, UnmapError};
use vm_memory::VolatileSlice;

use super::table::DmaTable;
use crate::shown::ShownMemory;
use crate::windows::WindowMemory;

/// Limits of what can be mapped for a device whose accesses go through a [`DmaTable`].
pub(crate) fn table_limits() -> MapperLimits {
    // Granule: the guest's smallest page. Most hosts' page tables can translate as many bits, as for other endpoints.
    MapperLimits { page_size_mask: !0xfff, iova_ranges: vec![0..=(1 << 48) - 1], max_mappings: None }
}

/// The table that a mapper fills. It is cleared with the mapper: the endpoint is gone, and reaches nothing any more.
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

/// Fills the table of a device that this process emulates.
///
/// An UNMAP that returns leaves no copy and no I/O under way. One that the host's kernel holds up for too long fails: the
/// guest is told so, and nothing of the range can be accessed by the device anew.
pub struct TableMapper {
    table: MapperTable,
}

impl TableMapper {
    /// A mapper for the device that sees `table`. There is to be one for each table.
    pub fn new(table: Arc<DmaTable>) -> Self {
        Self { table: MapperTable(table) }
    }

    /// To be called before the mapper goes to a virtio-iommu with windows, or with devices whose memory can be mapped: see
    /// [`DmaTable::connect`].
    pub fn connect(&self, windows: Option<&Arc<WindowMemory>>, devices: Option<&Arc<ShownMemory>>) {
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

    /// The table names the place in this process, which shows other memory while the guest does not see the chunk.
    fn keeps_page_tables(&self) -> bool {
        false
    }

    fn reaches_hidden_chunks(&self) -> bool {
        false
    }

    fn limits(&self) -> MapperLimits {
        table_limits()
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The I/O address space of an emulated device behind the virtio-iommu.

use std::io;
use std::sync::Arc;

use iommu_bounce::{DmaMapper, MapError, MapperLimits, Permissions, UnmapError};
use vm_memory::VolatileSlice;

use super::table::{DmaTable, RemoveError};
use crate::shown::ShownMemory;
use crate::windows::WindowMemory;

/// Granule of what is mapped: the guest's smallest page.
const PAGE: u64 = 4096;
/// What can be mapped at most: what page tables of most hosts' IOMMUs can translate, as for other endpoints.
const LAST_IOVA: u64 = (1 << 48) - 1;

/// Fills the table of a device that this process emulates.
///
/// An UNMAP that returns leaves no copy and no I/O under way. One that the host's kernel holds up for too long fails: the
/// guest is told so, and nothing of the range can be accessed by the device anew.
pub struct TableMapper {
    table: Arc<DmaTable>,
}

impl TableMapper {
    /// A mapper for the device that sees `table`. There is to be one for each table.
    pub fn new(table: Arc<DmaTable>) -> Self {
        Self { table }
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
        self.table.remove(iova, len, |_, _| {}).map_err(|error| match error {
            RemoveError::NotWhole => UnmapError::NotMapped,
            RemoveError::Busy => UnmapError::Host(io::ErrorKind::TimedOut.into()),
        })
    }

    /// The table names the place in this process, which shows other memory while the guest does not see the chunk.
    fn keeps_page_tables(&self) -> bool {
        false
    }

    fn reaches_hidden_chunks(&self) -> bool {
        false
    }

    fn limits(&self) -> MapperLimits {
        MapperLimits { page_size_mask: !(PAGE - 1), iova_ranges: vec![0..=LAST_IOVA], max_mappings: None }
    }
}

impl Drop for TableMapper {
    fn drop(&mut self) {
        // The endpoint is gone, and reaches nothing any more.
        self.table.clear();
    }
}

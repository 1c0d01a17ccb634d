// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Mapper that reports its pins to [`Reclaim`].

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use iommu_bounce::{DmaMapper, EndpointId, MapError, MapperGroup, MapperLimits, Permissions, UnmapError};
use vm_memory::VolatileSlice;

use super::Reclaim;

/// Record of all mappings. For each IOVA, the record has the address in this process and the length.
struct Ledger {
    reclaim: Arc<Reclaim>,
    mapped: BTreeMap<u64, (usize, u64)>,
}

impl Ledger {
    fn forget(&mut self, iova: u64, len: u64) {
        let last = iova.saturating_add(len.saturating_sub(1));
        while let Some((&first, &(address, len))) = self.mapped.range(iova..=last).next() {
            self.mapped.remove(&first);
            self.reclaim.count(address, len, false);
        }
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        self.forget(0, u64::MAX);
    }
}

/// Wrapper around a mapper that pins memory. The wrapper reports the pins to [`Reclaim`].
///
/// If the mapper has n mappings, the wrapper adds O(log n) time to each new mapping. In addition, [`Reclaim`] needs time to count the pins.
pub struct PinningMapper<M> {
    /// The mapper is the first field, so it is dropped before `ledger`. Mapped pages count as pinned until the mapper is dropped.
    mapper: M,
    ledger: Ledger,
}

impl<M: DmaMapper> PinningMapper<M> {
    /// Wraps a mapper that has no mappings yet.
    pub fn new(mapper: M, reclaim: Arc<Reclaim>) -> Self {
        Self { mapper, ledger: Ledger { reclaim, mapped: BTreeMap::new() } }
    }
}

impl<M: DmaMapper> DmaMapper for PinningMapper<M> {
    fn map(&mut self, iova: u64, memory: VolatileSlice<'_>, permissions: Permissions) -> Result<(), MapError> {
        let (address, len) = (memory.ptr_guard().as_ptr() as usize, memory.len() as u64);
        // Count before mapping, so that no page is given back after the host has pinned it.
        self.ledger.reclaim.count(address, len, true);
        let outcome = self.mapper.map(iova, memory, permissions);
        match outcome {
            Ok(()) => drop(self.ledger.mapped.insert(iova, (address, len))),
            Err(_) => self.ledger.reclaim.count(address, len, false),
        }
        outcome
    }

    fn unmap(&mut self, iova: u64, len: u64) -> Result<(), UnmapError> {
        self.mapper.unmap(iova, len)?;
        self.ledger.forget(iova, len);
        Ok(())
    }

    fn limits(&self) -> MapperLimits {
        self.mapper.limits()
    }

    fn maps_hidden_chunks(&self) -> bool {
        self.mapper.maps_hidden_chunks()
    }

    fn keeps_page_tables(&self) -> bool {
        self.mapper.keeps_page_tables()
    }

    fn group(&self) -> Option<MapperGroup> {
        self.mapper.group()
    }

    fn adopt(&mut self, endpoint: EndpointId) -> io::Result<()> {
        self.mapper.adopt(endpoint)
    }
}

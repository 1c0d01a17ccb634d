// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Window memory: the backed chunks, and the chunks that cannot be released yet.

use std::collections::BTreeSet;
use std::io;

use log::{debug, error, info};
use vm_memory::VolatileSlice;

use crate::backend::{ChunkError, ChunkStore};
use crate::config::WindowConfig;
use crate::counters::Counters;
use crate::spec::Status;

/// Chunks of all domains together, and their budget.
pub(crate) struct Windows {
    pub(crate) config: WindowConfig,
    store: Box<dyn ChunkStore>,
    /// Number of backed chunks, including parked, held and lost chunks.
    backed: u64,
    /// Held chunks: no domain owns them any more, but a host address space still maps them.
    held: Vec<u32>,
    /// Chunks that are never released. The host failed to unmap them before the engine removed their address space, so the host may still
    /// map them.
    doomed: BTreeSet<u32>,
    /// Lost chunks that the store may be able to release later.
    lost: BTreeSet<u32>,
}

impl Windows {
    pub(crate) fn new(config: WindowConfig, store: Box<dyn ChunkStore>) -> Self {
        Self { config, store, backed: 0, held: Vec::new(), doomed: BTreeSet::new(), lost: BTreeSet::new() }
    }

    pub(crate) fn chunk_size(&self) -> u64 {
        self.store.chunk_size()
    }

    pub(crate) fn region_size(&self) -> u64 {
        self.store.region_size()
    }

    /// True if `[start, last]` touches the aperture.
    pub(crate) fn touches_aperture(&self, start: u64, last: u64) -> bool {
        start <= *self.config.aperture.end() && last >= *self.config.aperture.start()
    }

    /// True if `iova` lies in the aperture and is a multiple of the chunk size, so that a chunk can be mapped there.
    pub(crate) fn is_place(&self, iova: u64) -> bool {
        self.config.aperture.contains(&iova) && iova.is_multiple_of(self.chunk_size())
    }

    /// Backs a chunk, if the budget allows it.
    pub(crate) fn back(&mut self, counters: &mut Counters) -> Result<u32, Status> {
        self.back_with(counters, |store| store.back())
    }

    /// Backs the chunk with this index, if the budget allows it. Returns `INVAL` if the index is out of range or in use.
    pub(crate) fn back_at(&mut self, index: u32, counters: &mut Counters) -> Result<(), Status> {
        self.back_with(counters, |store| store.back_at(index))
    }

    fn back_with<T>(
        &mut self,
        counters: &mut Counters,
        back: impl FnOnce(&mut dyn ChunkStore) -> Result<T, ChunkError>,
    ) -> Result<T, Status> {
        let chunk_size = self.chunk_size();
        let wanted = (self.backed + 1).checked_mul(chunk_size);
        if wanted.is_none_or(|wanted| wanted > self.config.budget) {
            return Err(Status::NoMem);
        }
        let backed = back(&mut *self.store).map_err(|error| {
            counters.host_errors += 1;
            debug!("virtio-iommu: cannot back a window chunk: {error}");
            match error {
                ChunkError::NoResources => Status::NoMem,
                ChunkError::Host(error) if error.kind() == io::ErrorKind::InvalidInput => Status::Inval,
                ChunkError::Host(_) => Status::DevErr,
            }
        })?;
        self.backed += 1;
        counters.note_window(self.backed * chunk_size);
        Ok(backed)
    }

    /// Hides and zeroes a chunk that keeps its host mapping, or zeroes a chunk that is already parked. Returns `false` if the
    /// store fails.
    pub(crate) fn park(&mut self, index: u32, counters: &mut Counters) -> bool {
        if self.doomed.contains(&index) {
            return false;
        }
        let outcome = self.store.park(index);
        note(outcome, "park", index, counters)
    }

    /// Makes a parked chunk visible to the guest again. Returns `false` if the store fails.
    pub(crate) fn unpark(&mut self, index: u32, counters: &mut Counters) -> bool {
        let outcome = self.store.unpark(index);
        note(outcome, "unpark", index, counters)
    }

    /// True if more memory is backed than the budget allows.
    pub(crate) fn is_over_budget(&self) -> bool {
        self.backed.saturating_mul(self.chunk_size()) > self.config.budget
    }

    /// Returns the memory of a backed chunk.
    pub(crate) fn memory(&self, index: u32) -> Option<VolatileSlice<'_>> {
        let memory = self.store.memory(index)?;
        (memory.len() as u64 == self.chunk_size()).then_some(memory)
    }

    /// Returns the offset of a chunk in the shared region.
    pub(crate) fn offset(&self, index: u32) -> u64 {
        u64::from(index) * self.chunk_size()
    }

    /// Releases a chunk that no address space maps any more, unless it is doomed.
    pub(crate) fn release(&mut self, index: u32, counters: &mut Counters) {
        if self.doomed.contains(&index) {
            counters.lost_chunks += 1;
            return;
        }
        match self.store.release(index) {
            Ok(()) => {
                self.backed -= 1;
                counters.note_window(self.backed * self.chunk_size());
            }
            Err(error) => {
                error!(
                    "virtio-iommu: cannot release window chunk {index}, so its memory is lost until a later retry succeeds: {error}"
                );
                counters.host_errors += 1;
                counters.lost_chunks += 1;
                self.lost.insert(index);
            }
        }
    }

    /// Retries the release of a lost chunk in the store. Returns `false` if no chunk is lost, or the retry failed.
    pub(crate) fn recover(&mut self, counters: &mut Counters) -> bool {
        let Some(index) = self.store.recover() else { return false };
        // The store can also lose a chunk when it fails to back the chunk. Such a chunk was never counted as backed.
        if self.lost.remove(&index) {
            info!("virtio-iommu: window chunk {index}, which was lost before, is released");
            self.backed -= 1;
            counters.lost_chunks -= 1;
            counters.note_window(self.backed * self.chunk_size());
        }
        true
    }

    /// Records a chunk that an address space still maps.
    pub(crate) fn hold(&mut self, index: u32) {
        self.held.push(index);
    }

    /// Marks a chunk that must never be released.
    pub(crate) fn doom(&mut self, index: u32) {
        self.doomed.insert(index);
    }

    /// Removes and returns the held chunks. The caller must release these chunks or hold them again.
    pub(crate) fn take_held(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.held)
    }
}

/// Counts and logs an error of the store.
fn note(outcome: Result<(), ChunkError>, what: &str, index: u32, counters: &mut Counters) -> bool {
    outcome
        .inspect_err(|error| {
            counters.host_errors += 1;
            debug!("virtio-iommu: cannot {what} window chunk {index}: {error}");
        })
        .is_ok()
}

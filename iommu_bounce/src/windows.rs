// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Window memory: how much is backed, and which chunks cannot be given back yet.

use std::collections::BTreeSet;
use std::io;

use log::{debug, error, info};
use vm_memory::VolatileSlice;

use crate::backend::{ChunkError, ChunkStore};
use crate::config::WindowConfig;
use crate::counters::Counters;
use crate::spec::Status;

/// The chunks of all domains together, and the budget over them.
pub(crate) struct Windows {
    pub(crate) config: WindowConfig,
    store: Box<dyn ChunkStore>,
    /// Chunks backed: those of domains, held and lost ones.
    backed: u64,
    /// Held chunks: no domain has them any more, but an address space of the host still maps them.
    held: Vec<u32>,
    /// Chunks that can never be given back: nobody knows whether the host still maps them.
    doomed: BTreeSet<u32>,
    /// Lost chunks that the store may be able to give back later.
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

    /// Whether `[start, last]` touches the aperture.
    pub(crate) fn touches_aperture(&self, start: u64, last: u64) -> bool {
        start <= *self.config.aperture.end() && last >= *self.config.aperture.start()
    }

    /// Whether a chunk can be at `iova`.
    pub(crate) fn is_place(&self, iova: u64) -> bool {
        self.config.aperture.contains(&iova) && iova.is_multiple_of(self.chunk_size())
    }

    /// Backs a chunk within the budget.
    pub(crate) fn back(&mut self, counters: &mut Counters) -> Result<u32, Status> {
        self.back_with(counters, |store| store.back())
    }

    /// Backs the chunk of this index within the budget: `INVAL` if it cannot be that one.
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
            debug!("backing a chunk: {error}");
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

    /// Hides and zeroes a chunk that keeps its host mapping, or zeroes one that is parked already. `false` if the
    /// store fails.
    pub(crate) fn park(&mut self, index: u32, counters: &mut Counters) -> bool {
        if self.doomed.contains(&index) {
            return false;
        }
        let outcome = self.store.park(index);
        note(outcome, "parking", index, counters)
    }

    /// Shows a parked chunk to the guest again. `false` if the store fails.
    pub(crate) fn unpark(&mut self, index: u32, counters: &mut Counters) -> bool {
        let outcome = self.store.unpark(index);
        note(outcome, "showing", index, counters)
    }

    /// Whether more is backed than the budget allows.
    pub(crate) fn is_over_budget(&self) -> bool {
        self.backed.saturating_mul(self.chunk_size()) > self.config.budget
    }

    /// The memory of a backed chunk.
    pub(crate) fn memory(&self, index: u32) -> Option<VolatileSlice<'_>> {
        let memory = self.store.memory(index)?;
        (memory.len() as u64 == self.chunk_size()).then_some(memory)
    }

    /// Where a chunk is in the shared region.
    pub(crate) fn offset(&self, index: u32) -> u64 {
        u64::from(index) * self.chunk_size()
    }

    /// Gives a chunk back that no address space maps any more, unless it is doomed.
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
                error!("chunk {index} is lost, it could not be given back: {error}");
                counters.host_errors += 1;
                counters.lost_chunks += 1;
                self.lost.insert(index);
            }
        }
    }

    /// Has the store try again to give back a chunk that was lost; `false` if there is none, or it is still lost.
    pub(crate) fn recover(&mut self, counters: &mut Counters) -> bool {
        let Some(index) = self.store.recover() else { return false };
        // The store may have lost one while it was to be backed: that one never was.
        if self.lost.remove(&index) {
            info!("chunk {index} is given back, which was lost");
            self.backed -= 1;
            counters.lost_chunks -= 1;
            counters.note_window(self.backed * self.chunk_size());
        }
        true
    }

    /// Keeps a chunk that an address space still maps.
    pub(crate) fn hold(&mut self, index: u32) {
        self.held.push(index);
    }

    /// Marks a chunk as never to be given back.
    pub(crate) fn doom(&mut self, index: u32) {
        self.doomed.insert(index);
    }

    /// Takes the held chunks out, to be given back or held again.
    pub(crate) fn take_held(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.held)
    }
}

/// Counts and logs what the store refuses.
fn note(outcome: Result<(), ChunkError>, what: &str, index: u32, counters: &mut Counters) -> bool {
    outcome
        .inspect_err(|error| {
            counters.host_errors += 1;
            debug!("{what} chunk {index}: {error}");
        })
        .is_ok()
}

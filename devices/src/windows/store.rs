// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Interface of window memory for the engine, which backs and releases chunks.

use std::io;
use std::sync::Arc;

use iommu_bounce::{ChunkError, ChunkStore};
use vm_memory::VolatileSlice;

use super::chunk::Chunk;
use super::shared::{ChunkPlace, SharedWindows, WindowState};
use super::supply::{self, shortage};
use crate::sync::lock;

/// Store of chunks for the engine.
pub struct WindowStore(Arc<SharedWindows>);

impl WindowStore {
    pub(super) fn new(shared: Arc<SharedWindows>) -> Self {
        Self(shared)
    }

    /// Maps `chunk` at place `index`, and makes the chunk visible to the guest.
    fn install(&self, state: &mut WindowState, index: u32, chunk: &Chunk) -> io::Result<()> {
        self.0.region.map(index, chunk)?;
        if state.address.is_none() {
            // `WindowMemory::moved` creates the slot once the region has an address.
            return Ok(());
        }
        self.0.show(state, index)
    }

    /// Cleans up place `index` after a chunk could not be installed there. The place becomes free. If the scratch chunk cannot be mapped
    /// either, the place is lost.
    fn abandon(&self, state: &mut WindowState, index: u32) {
        if self.0.region.map(index, &self.0.scratch).is_ok() {
            state.places[index as usize] = ChunkPlace::Released;
            state.free.push(index);
        } else {
            self.0.hide(state, index);
            state.places[index as usize] = ChunkPlace::Lost;
            state.lost.push_back(index);
            state.supply.note_backed();
        }
    }
}

impl ChunkStore for WindowStore {
    fn chunk_size(&self) -> u64 {
        self.0.chunk_size
    }

    fn region_size(&self) -> u64 {
        self.0.region_size
    }

    fn back(&mut self) -> Result<u32, ChunkError> {
        let state = lock(&self.0.state);
        let next = state.free.last().copied().filter(|_| state.address.is_some()).ok_or(ChunkError::NoResources)?;
        drop(state);
        self.back_at(next)?;
        Ok(next)
    }

    /// Backs the chunk at `index`. This works even before the region has an address, because a restored region gets its address later.
    fn back_at(&mut self, index: u32) -> Result<(), ChunkError> {
        let state = lock(&self.0.state);
        if !state.free.iter().rev().any(|free| *free == index) {
            return Err(unknown());
        }
        if state.supply.is_used_up() {
            return Err(ChunkError::NoResources);
        }
        let (mut state, chunk) = supply::take(&*self.0, state)?;
        // Search from the end of the list, because `back` takes places from this end. The place is still free, because only this store
        // takes places.
        let place = state.free.iter().rposition(|free| *free == index).ok_or_else(unknown)?;
        state.free.remove(place);
        if let Err(error) = self.install(&mut state, index, &chunk) {
            self.abandon(&mut state, index);
            return Err(shortage(error));
        }
        state.places[index as usize] = ChunkPlace::Backed(chunk);
        state.supply.note_backed();
        self.0.work.notify_one();
        Ok(())
    }

    fn memory(&self, index: u32) -> Option<VolatileSlice<'_>> {
        let backed = matches!(lock(&self.0.state).places.get(index as usize), Some(ChunkPlace::Backed(_)));
        backed.then(|| self.0.region.slice(index)).flatten()
    }

    fn park(&mut self, index: u32) -> Result<(), ChunkError> {
        let mut state = lock(&self.0.state);
        let place = state.places.get_mut(index as usize).ok_or_else(unknown)?;
        match place {
            // Another process could write to the chunk at any time, so no other owner may get the chunk.
            ChunkPlace::Backed(chunk) if chunk.is_handed_out() => {
                return Err(ChunkError::Host(io::ErrorKind::Unsupported.into()));
            }
            ChunkPlace::Backed(chunk) => {
                self.0.region.map(index, &self.0.scratch)?;
                chunk.zero(self.0.chunk_len()?)?;
            }
            ChunkPlace::Parked(chunk) => return Ok(chunk.zero(self.0.chunk_len()?)?),
            _ => return Err(unknown()),
        }
        if let ChunkPlace::Backed(chunk) = std::mem::replace(place, ChunkPlace::Lost) {
            *place = ChunkPlace::Parked(chunk);
        }
        Ok(())
    }

    fn unpark(&mut self, index: u32) -> Result<(), ChunkError> {
        let mut state = lock(&self.0.state);
        let Some(ChunkPlace::Parked(chunk)) = state.places.get(index as usize) else { return Err(unknown()) };
        let visible = self.0.region.map(index, chunk).and_then(|()| self.0.show(&mut state, index));
        if let Err(error) = visible {
            if self.0.region.map(index, &self.0.scratch).is_err() {
                self.0.hide(&mut state, index);
            }
            return Err(shortage(error));
        }
        let place = &mut state.places[index as usize];
        if let ChunkPlace::Parked(chunk) = std::mem::replace(place, ChunkPlace::Lost) {
            *place = ChunkPlace::Backed(chunk);
        }
        Ok(())
    }

    fn release(&mut self, index: u32) -> Result<(), ChunkError> {
        let mut state = lock(&self.0.state);
        let place = state.places.get_mut(index as usize);
        let place =
            place.filter(|place| matches!(place, ChunkPlace::Backed(_) | ChunkPlace::Parked(_))).ok_or_else(unknown)?;
        let (ChunkPlace::Backed(chunk) | ChunkPlace::Parked(chunk)) = std::mem::replace(place, ChunkPlace::Lost) else {
            unreachable!("filtered above")
        };
        if let Err(error) = self.0.region.map(index, &self.0.scratch) {
            // The guest must not see a released chunk. The file may still be mapped, so the chunk still counts against the budget.
            self.0.hide(&mut state, index);
            state.lost.push_back(index);
            return Err(ChunkError::Host(error));
        }
        state.places[index as usize] = ChunkPlace::Released;
        state.free.push(index);
        state.supply.retire(chunk);
        self.0.work.notify_one();
        Ok(())
    }

    /// Retries one lost place by mapping the scratch chunk over it. This mapping frees the lost chunk's memory, because its file was
    /// dropped when the place was lost.
    fn recover(&mut self) -> Option<u32> {
        let mut state = lock(&self.0.state);
        let index = state.lost.pop_front()?;
        if self.0.region.map(index, &self.0.scratch).is_err() {
            state.lost.push_back(index);
            return None;
        }
        state.places[index as usize] = ChunkPlace::Released;
        state.free.push(index);
        state.supply.note_recovered();
        self.0.work.notify_one();
        Some(index)
    }
}

/// Returns the error for an index without a suitable chunk.
fn unknown() -> ChunkError {
    ChunkError::Host(io::ErrorKind::InvalidInput.into())
}

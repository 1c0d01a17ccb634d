// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The state of window memory, which its owner, the engine's store and the stash's thread share.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use log::warn;

use super::chunk::Chunk;
use super::region::Region;
use super::supply::{Monitor, Supply};
use crate::platform::MemorySlots;
use crate::sync::lock;

/// What owner, store and stash share.
pub(super) struct SharedWindows {
    pub(super) chunk_size: u64,
    pub(super) region_size: u64,
    pub(super) hugepages: bool,
    pub(super) region: Region,
    pub(super) slots: Arc<dyn MemorySlots>,
    /// What released places show.
    pub(super) scratch: Chunk,
    pub(super) state: Mutex<WindowState>,
    /// Wakes the stash: there is something to do.
    pub(super) work: Condvar,
    /// Wakes those who wait for the stash.
    pub(super) done: Condvar,
}

/// What a place in the region holds.
#[derive(Debug)]
pub(super) enum ChunkPlace {
    /// Nothing yet: not mapped, no slot.
    Fresh,
    /// A chunk that the engine has.
    Backed(Chunk),
    /// A chunk that the engine has and the guest does not see: it sees the scratch chunk.
    Parked(Chunk),
    /// The scratch chunk.
    Released,
    /// Something that could not be taken away yet. Not used, and counted as backed.
    Lost,
}

/// The state of window memory.
pub(super) struct WindowState {
    /// Guest-physical address of the region, once it has one.
    pub(super) address: Option<u64>,
    pub(super) places: Vec<ChunkPlace>,
    /// The memory slot of each place that was ever backed.
    pub(super) slots: Vec<Option<u32>>,
    /// Places to use, the next one last.
    pub(super) free: Vec<u32>,
    /// Lost places, the next one to be tried again first.
    pub(super) lost: VecDeque<u32>,
    /// Chunks, backed and to come, against the budget.
    pub(super) supply: Supply<Chunk>,
}

impl AsMut<Supply<Chunk>> for WindowState {
    fn as_mut(&mut self) -> &mut Supply<Chunk> {
        &mut self.supply
    }
}

impl Monitor for SharedWindows {
    type Chunk = Chunk;
    type Guard<'g> = MutexGuard<'g, WindowState>;

    fn lock(&self) -> MutexGuard<'_, WindowState> {
        lock(&self.state)
    }
    fn wait_for_work<'g>(&'g self, guard: MutexGuard<'g, WindowState>) -> MutexGuard<'g, WindowState> {
        self.work.wait(guard).unwrap_or_else(PoisonError::into_inner)
    }
    fn wait_until_done<'g>(&'g self, guard: MutexGuard<'g, WindowState>) -> MutexGuard<'g, WindowState> {
        self.done.wait(guard).unwrap_or_else(PoisonError::into_inner)
    }
    fn tell_done(&self) {
        self.done.notify_all();
    }
    fn allocate(&self) -> io::Result<Chunk> {
        Chunk::allocate(self.chunk_size, self.hugepages)
    }
}

impl SharedWindows {
    /// Bytes of a chunk.
    pub(super) fn chunk_len(&self) -> io::Result<usize> {
        usize::try_from(self.chunk_size).map_err(io::Error::other)
    }

    /// Makes the slot of place `index`, to which something is mapped, unless it has one.
    pub(super) fn show(&self, state: &mut WindowState, index: u32) -> io::Result<()> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        let slot = state.slots.get_mut(index as usize).ok_or_else(invalid)?;
        if slot.is_some() {
            return Ok(());
        }
        let offset = u64::from(index) * self.chunk_size;
        let gpa = state.address.and_then(|address| address.checked_add(offset)).ok_or_else(invalid)?;
        let host = self.region.place(index).ok_or_else(invalid)?;
        // SAFETY: The region stays mapped until it is dropped, which is after `Drop for SharedWindows` has removed all slots,
        // and nobody makes references to its bytes.
        *slot = Some(unsafe { self.slots.insert(gpa, host, false) }?);
        Ok(())
    }

    /// Takes the slot of place `index` away, for a place that cannot be used any more.
    pub(super) fn hide(&self, state: &mut WindowState, index: u32) {
        if let Some(slot) = state.slots.get_mut(index as usize).and_then(Option::take)
            && let Err(error) = self.slots.remove(slot)
        {
            warn!("memory slot {slot} of window chunk {index} could not be removed: {error}");
        }
    }
}

impl Drop for SharedWindows {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        for slot in state.slots.iter_mut().filter_map(Option::take) {
            if let Err(error) = self.slots.remove(slot) {
                warn!("memory slot {slot} of window memory could not be removed: {error}");
            }
        }
    }
}

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

/// Where the guest sees a place of the region.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    gpa: u64,
    number: u32,
}

/// The state of window memory.
pub(super) struct WindowState {
    /// Guest-physical address of the region, once it has one.
    pub(super) address: Option<u64>,
    pub(super) places: Vec<ChunkPlace>,
    /// The memory slot of each place that was ever backed.
    pub(super) slots: Vec<Option<Slot>>,
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

    /// Makes the slot of place `index`, which has a mapping, unless there is one where the region is now.
    ///
    /// # Errors
    /// The platform refuses. The guest does not see the place then, or where the region was before.
    pub(super) fn show(&self, state: &mut WindowState, index: u32) -> io::Result<()> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        let slot = state.slots.get_mut(index as usize).ok_or_else(invalid)?;
        let offset = u64::from(index) * self.chunk_size;
        let gpa = state.address.and_then(|address| address.checked_add(offset)).ok_or_else(invalid)?;
        if slot.is_some_and(|slot| slot.gpa == gpa) {
            return Ok(());
        }
        self.remove(slot)?;
        let host = self.region.place(index).ok_or_else(invalid)?;
        // SAFETY: The region stays mapped until it is dropped, which is after `Drop for SharedWindows` has removed all slots, or
        // for ever where one of them stays. No code makes references to its bytes.
        let number = unsafe { self.slots.insert(gpa, host, false) }?;
        *slot = Some(Slot { gpa, number });
        Ok(())
    }

    /// Removes the slot of place `index`, which cannot be used any more. A slot that stays is kept: the next [`Self::show`] finds it.
    pub(super) fn hide(&self, state: &mut WindowState, index: u32) {
        if let Some(slot) = state.slots.get_mut(index as usize)
            && let Err(error) = self.remove(slot)
        {
            warn!("the memory slot of window chunk {index} could not be removed, the guest sees it still: {error}");
        }
    }

    /// Removes a slot. On failure it is there still.
    fn remove(&self, slot: &mut Option<Slot>) -> io::Result<()> {
        if let Some(Slot { number, .. }) = *slot {
            self.slots.remove(number)?;
            *slot = None;
        }
        Ok(())
    }
}

impl Drop for SharedWindows {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        for Slot { number, .. } in state.slots.iter_mut().filter_map(Option::take) {
            if let Err(error) = self.slots.remove(number) {
                warn!("a memory slot of window memory could not be removed, so the region stays mapped: {error}");
                self.region.keep();
            }
        }
    }
}

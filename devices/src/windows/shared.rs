// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! State of window memory that its owner, the engine's store and the stash's thread share.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use log::warn;

use super::chunk::Chunk;
use super::region::Region;
use super::supply::{Monitor, Supply};
use crate::platform::MemorySlots;
use crate::sync::lock;

/// Window memory that the owner, the store and the stash share.
pub(super) struct SharedWindows {
    pub(super) chunk_size: u64,
    pub(super) region_size: u64,
    pub(super) hugepages: bool,
    pub(super) region: Region,
    pub(super) slots: Arc<dyn MemorySlots>,
    /// Chunk that is mapped at all released and parked places.
    pub(super) scratch: Chunk,
    pub(super) state: Mutex<WindowState>,
    /// Wakes the stash's thread when it has work.
    pub(super) work: Condvar,
    /// Wakes threads that wait for the stash.
    pub(super) done: Condvar,
}

/// Content of a place in the region.
#[derive(Debug)]
pub(super) enum ChunkPlace {
    /// No chunk was ever backed at this place. Nothing is mapped, and the place has no slot.
    Fresh,
    /// A chunk that the engine uses.
    Backed(Chunk),
    /// A chunk that the engine keeps, hidden from the guest. The guest sees the scratch chunk instead.
    Parked(Chunk),
    /// The scratch chunk, because the chunk of this place was released.
    Released,
    /// An old mapping that could not be replaced yet. The place cannot be used, but its memory still counts as backed.
    Lost,
}

/// Memory slot through which the guest sees a place of the region.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    gpa: u64,
    number: u32,
}

/// Changing part of the state of window memory. A lock protects this part.
pub(super) struct WindowState {
    /// Guest-physical address of the region, or `None` while the region has no address.
    pub(super) address: Option<u64>,
    pub(super) places: Vec<ChunkPlace>,
    /// Memory slot of each place that was ever backed.
    pub(super) slots: Vec<Option<Slot>>,
    /// Free places. The last place in the list is used next.
    pub(super) free: Vec<u32>,
    /// Lost places. The first place in the list is retried next.
    pub(super) lost: VecDeque<u32>,
    /// Supply of chunks, and the budget.
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
    fn report_done(&self) {
        self.done.notify_all();
    }
    fn allocate(&self) -> io::Result<Chunk> {
        Chunk::allocate(self.chunk_size, self.hugepages)
    }
}

impl SharedWindows {
    /// Returns the size of a chunk in bytes.
    pub(super) fn chunk_len(&self) -> io::Result<usize> {
        usize::try_from(self.chunk_size).map_err(io::Error::other)
    }

    /// Creates the memory slot of place `index`, unless the place has a slot at the region's current address. The place must have a
    /// mapping.
    ///
    /// # Errors
    /// A call of [`MemorySlots`] failed. In this case the guest does not see the place, or sees the place at the region's old address.
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
        // SAFETY: The region stays mapped until it is dropped. Before that, `Drop for SharedWindows` removes all slots. If a slot cannot be
        // removed, the region stays mapped for ever. No code creates references to the region's bytes.
        let number = unsafe { self.slots.insert(gpa, host, false) }?;
        *slot = Some(Slot { gpa, number });
        Ok(())
    }

    /// Hides place `index`, which is unusable, from the guest by removing its slot. If the removal fails, the slot stays recorded, and the
    /// next [`Self::show`] of the place finds the slot.
    pub(super) fn hide(&self, state: &mut WindowState, index: u32) {
        if let Some(slot) = state.slots.get_mut(index as usize)
            && let Err(error) = self.remove(slot)
        {
            warn!("cannot remove the memory slot of window chunk {index}, so the guest still sees the chunk: {error}");
        }
    }

    /// Removes a slot. If this fails, the slot still exists.
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
                warn!("cannot remove a memory slot of window memory, so the region stays mapped: {error}");
                self.region.keep();
            }
        }
    }
}

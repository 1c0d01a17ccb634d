// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Owner of window memory.

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

use iommu_bounce::Permissions;
use log::warn;
use thiserror::Error;
use vm_memory::VolatileSlice;

use super::chunk::{Chunk, HUGE_PAGE};
use super::region::Region;
use super::shared::{ChunkPlace, SharedWindows, WindowState};
use super::store::WindowStore;
use super::supply::{self, Supply};
use crate::file_size;
use crate::platform::MemorySlots;
use crate::sandbox::{self, ThreadRole, calls};
use crate::sync::{lock, lock_soon};

/// Role of the thread that allocates window memory ahead of requests, and frees released window memory.
pub const STASH_ROLE: ThreadRole = ThreadRole { name: "window-stash", calls: &[calls::MAPPINGS] };

/// Minimum size of a chunk: one page.
const MIN_CHUNK: u64 = 4096;

/// Configuration of window memory.
#[derive(Clone)]
pub struct WindowMemoryConfig {
    /// Size of the region in bytes, a multiple of `chunk_size`. At most this many bytes can be backed.
    pub region_size: u64,
    /// Size of a chunk in bytes, a power of two and at least 4 KiB.
    pub chunk_size: u64,
    /// Initial budget: the maximum number of bytes that the host allocates for chunks. [`WindowMemory::set_budget`] changes the budget.
    pub budget: u64,
    /// True if chunks consist of reserved huge pages of 2 MiB.
    pub hugepages: bool,
    /// Memory slots through which the guest sees window memory.
    pub slots: Arc<dyn MemorySlots>,
}

/// Error while window memory is set up.
#[derive(Debug, Error)]
pub enum WindowError {
    /// The chunk size is invalid.
    #[error("chunk_size is {0:#x}, but must be a power of two of at least {MIN_CHUNK:#x} bytes")]
    ChunkSize(u64),
    /// The region does not consist of whole chunks.
    #[error(
        "region_size is {region:#x}, but must be a positive multiple of chunk_size ({chunk:#x} bytes), and less than 2^32 chunks"
    )]
    RegionSize {
        /// Size of the region in bytes.
        region: u64,
        /// Size of a chunk in bytes.
        chunk: u64,
    },
    /// Chunks do not consist of whole huge pages.
    #[error("hugepages is on with a chunk_size of {0:#x}: chunk_size must be a multiple of {HUGE_PAGE:#x} bytes")]
    HugePages(u64),
    /// The host rejected an operation that every region needs.
    #[error("cannot {what}: {source}")]
    Host {
        /// Failed operation.
        what: &'static str,
        /// Error of the host kernel.
        source: io::Error,
    },
}

/// Owner of window memory. The owner sets the region's guest-physical address and the budget. The engine uses the memory through
/// [`WindowStore`].
pub struct WindowMemory {
    shared: Arc<SharedWindows>,
    stash: Option<JoinHandle<()>>,
}

impl WindowMemory {
    /// Reserves the region and starts the stash's thread. Allocates only the scratch chunk.
    ///
    /// # Errors
    /// A [`WindowError`] names the field and its rule, or the operation that the host rejected.
    pub fn new(config: &WindowMemoryConfig) -> Result<Self, WindowError> {
        let WindowMemoryConfig { region_size, chunk_size, budget, hugepages, ref slots } = *config;
        if !chunk_size.is_power_of_two() || chunk_size < MIN_CHUNK {
            return Err(WindowError::ChunkSize(chunk_size));
        }
        if hugepages && !chunk_size.is_multiple_of(HUGE_PAGE) {
            return Err(WindowError::HugePages(chunk_size));
        }
        let bad_region = WindowError::RegionSize { region: region_size, chunk: chunk_size };
        let count = u32::try_from(region_size / chunk_size).unwrap_or(0);
        let (Ok(chunk_len), Ok(places)) = (usize::try_from(chunk_size), usize::try_from(count)) else {
            return Err(bad_region);
        };
        if count == 0 || !region_size.is_multiple_of(chunk_size) {
            return Err(bad_region);
        }
        let host = |what| move |source| WindowError::Host { what, source };
        let mut region = Region::reserve(chunk_len, places).map_err(host("reserve addresses for window memory"))?;
        region.set_name(hugepages);
        let scratch = Chunk::allocate(chunk_size, false).map_err(file_size::explain);
        let scratch = scratch.map_err(host("allocate a chunk of window memory"))?;
        let state = WindowState {
            address: None,
            places: (0..count).map(|_| ChunkPlace::Fresh).collect(),
            slots: vec![None; places],
            free: (0..count).rev().collect(),
            lost: VecDeque::new(),
            supply: Supply::new(budget / chunk_size),
        };
        let shared = Arc::new(SharedWindows {
            chunk_size,
            region_size,
            hugepages,
            region,
            slots: slots.clone(),
            scratch,
            state: Mutex::new(state),
            work: Condvar::new(),
            done: Condvar::new(),
        });
        let for_stash = shared.clone();
        let (role, name) = (STASH_ROLE, STASH_ROLE.name.into());
        let stash = sandbox::start(role, name, move || supply::run(&*for_stash))
            .map_err(host("start the thread that prepares window memory"))?;
        Ok(Self { shared, stash: Some(stash) })
    }

    /// Returns the store for the engine. Only one store may be in use, because there is only one region.
    pub fn store(&self) -> WindowStore {
        WindowStore::new(self.shared.clone())
    }

    /// Returns the size of the region in bytes.
    pub fn region_size(&self) -> u64 {
        self.shared.region_size
    }

    /// Returns the number of bytes of window memory that the host has allocated. These bytes include chunks that are backed, stashed, or
    /// about to be freed. The scratch chunk does not count. The result exceeds the budget only if the budget was lowered while more bytes
    /// were allocated.
    pub fn held_bytes(&self) -> u64 {
        lock(&self.shared.state).supply.held() * self.shared.chunk_size
    }

    /// Like [`held_bytes`](Self::held_bytes), but returns `None` if another thread holds the lock for some microseconds.
    pub(crate) fn held_bytes_soon(&self) -> Option<u64> {
        lock_soon(&self.shared.state).map(|state| state.supply.held() * self.shared.chunk_size)
    }

    /// Changes the budget. Stashed chunks beyond the new budget are freed immediately. Backed chunks stay.
    pub fn set_budget(&self, bytes: u64) {
        lock(&self.shared.state).supply.set_budget(bytes / self.shared.chunk_size);
        self.shared.work.notify_one();
    }

    /// Records if the driver uses windows. If `in_use` is true, the stash is filled. Otherwise, the chunks of the stash are freed.
    pub fn set_in_use(&self, in_use: bool) {
        lock(&self.shared.state).supply.set_in_use(in_use);
        self.shared.work.notify_one();
    }

    /// Makes the next `attempts` attempts to map a chunk in the region fail with `ENOMEM`.
    #[cfg(test)]
    pub(super) fn refuse_maps(&self, attempts: u32) {
        self.shared.region.refusals.store(attempts, std::sync::atomic::Ordering::Relaxed);
    }

    /// Returns the index of the chunk at `address` of this process. Returns `None` if no chunk starts at `address`, or `len` is not the
    /// size of a chunk.
    pub(crate) fn find(&self, address: usize, len: usize) -> Option<u32> {
        self.shared.region.index(address).filter(|_| len as u64 == self.shared.chunk_size)
    }

    /// True if a chunk with this index is backed, so that the guest can see it.
    pub(crate) fn is_backed(&self, index: u32) -> bool {
        matches!(lock(&self.shared.state).places.get(index as usize), Some(ChunkPlace::Backed(_)))
    }

    /// Returns the memory of the place with this index. If no chunk is backed at this place, the memory may belong to the scratch chunk, or
    /// may be inaccessible.
    pub(crate) fn chunk(&self, index: u32) -> Option<VolatileSlice<'_>> {
        self.shared.region.slice(index)
    }

    /// Returns a file descriptor of a backed chunk for another process that does DMA. The descriptor allows exactly the accesses in
    /// `permissions`. After this, the chunk is never parked or reused. When the chunk is released, its memory is freed.
    ///
    /// Returns `None` if no such descriptor is possible: see [`Chunk::hand_out`].
    ///
    /// # Errors
    /// The chunk is not backed, or the host kernel rejected a call.
    pub(crate) fn hand_out(&self, index: u32, permissions: Permissions) -> io::Result<Option<OwnedFd>> {
        match lock(&self.shared.state).places.get_mut(index as usize) {
            Some(ChunkPlace::Backed(chunk)) => chunk.hand_out(permissions),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Moves the region to guest-physical `address`. The slots of all places that were ever backed move with the region.
    ///
    /// # Errors
    /// A call of [`MemorySlots`] failed when a slot was moved. If the old slot could not be removed, the guest still sees the place at its
    /// old address. If the new slot could not be created, the guest does not see the place.
    pub fn moved(&self, address: u64) -> io::Result<()> {
        let mut state = lock(&self.shared.state);
        if state.address == Some(address) {
            return Ok(());
        }
        state.address = Some(address);
        let mut result = Ok(());
        for index in (0u32..).take(state.places.len()) {
            let has_slot = state.slots.get(index as usize).is_some_and(Option::is_some);
            // A chunk that was restored before the region had an address has no slot yet.
            if has_slot || matches!(state.places.get(index as usize), Some(ChunkPlace::Backed(_))) {
                result = result.and(self.shared.show(&mut state, index));
            }
        }
        result
    }
}

impl Drop for WindowMemory {
    fn drop(&mut self) {
        lock(&self.shared.state).supply.stop();
        self.shared.work.notify_all();
        if let Some(stash) = self.stash.take()
            && stash.join().is_err()
        {
            warn!("the thread that prepares window memory panicked");
        }
    }
}

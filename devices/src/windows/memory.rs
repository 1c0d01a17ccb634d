// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The owner of window memory.

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

/// Role of the thread that allocates window memory ahead of requests, and gives it back.
pub const STASH_ROLE: ThreadRole = ThreadRole { name: "window-stash", calls: &[calls::MAPPINGS] };

/// The smallest chunk: a page.
const MIN_CHUNK: u64 = 4096;

/// How window memory is set up.
#[derive(Clone)]
pub struct WindowMemoryConfig {
    /// Bytes of the region: a multiple of `chunk_size`, and the most that can ever be backed.
    pub region_size: u64,
    /// Bytes per chunk: a power of two, 4 KiB at least.
    pub chunk_size: u64,
    /// Bytes that may be backed at first; [`WindowMemory::set_budget`] changes it.
    pub budget: u64,
    /// Chunks are made of huge pages of 2 MiB.
    pub hugepages: bool,
    /// Where the guest's view of memory is made.
    pub slots: Arc<dyn MemorySlots>,
}

/// Why window memory could not be set up.
#[derive(Debug, Error)]
pub enum WindowError {
    /// The chunk size does not suit.
    #[error("chunk_size is {0:#x}: it must be a power of two of at least {MIN_CHUNK:#x} bytes")]
    ChunkSize(u64),
    /// The region is not made of whole chunks.
    #[error("region_size is {region:#x}: it must be a positive multiple of chunk_size, {chunk:#x} bytes")]
    RegionSize {
        /// Bytes of the region.
        region: u64,
        /// Bytes per chunk.
        chunk: u64,
    },
    /// Chunks are smaller than the pages that they are to be made of.
    #[error("hugepages is on with a chunk_size of {0:#x}: it must be a multiple of {HUGE_PAGE:#x} bytes")]
    HugePages(u64),
    /// The host refused what every region needs.
    #[error("{what}: {source}")]
    Host {
        /// What was tried.
        what: &'static str,
        /// What the host said.
        source: io::Error,
    },
}

/// The owner of window memory: tells it where the guest sees the region, and what it may use. The engine's side is
/// [`WindowStore`].
pub struct WindowMemory {
    shared: Arc<SharedWindows>,
    stash: Option<JoinHandle<()>>,
}

impl WindowMemory {
    /// Reserves the region and starts the stash. No window memory is allocated but one scratch chunk.
    ///
    /// # Errors
    /// A [`WindowError`] that names the field and its rule, or what the host refused.
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
        let mut region = Region::reserve(chunk_len, places).map_err(host("reserving addresses for window memory"))?;
        region.set_name(hugepages);
        let scratch = Chunk::allocate(chunk_size, false).map_err(file_size::explain);
        let scratch = scratch.map_err(host("allocating a chunk of window memory"))?;
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
            .map_err(host("starting the thread that prepares window memory"))?;
        Ok(Self { shared, stash: Some(stash) })
    }

    /// The engine's side. There is one region, so only one store may be in use.
    pub fn store(&self) -> WindowStore {
        WindowStore::new(self.shared.clone())
    }

    /// Bytes of the region.
    pub fn region_size(&self) -> u64 {
        self.shared.region_size
    }

    /// Bytes of window memory that the host has allocated: backed, stashed, or about to be given back. Never above the
    /// budget, unless the budget was lowered below what was backed. The scratch chunk does not count.
    pub fn held_bytes(&self) -> u64 {
        lock(&self.shared.state).supply.held() * self.shared.chunk_size
    }

    /// The same; `None` if somebody keeps what it is read from.
    pub(crate) fn held_bytes_soon(&self) -> Option<u64> {
        lock_soon(&self.shared.state).map(|state| state.supply.held() * self.shared.chunk_size)
    }

    /// Changes the bytes that may be held. Stashed chunks beyond it are given back at once, backed ones stay.
    pub fn set_budget(&self, bytes: u64) {
        lock(&self.shared.state).supply.set_budget(bytes / self.shared.chunk_size);
        self.shared.work.notify_one();
    }

    /// The driver began or ceased to use windows: the stash is filled or given back.
    pub fn set_in_use(&self, in_use: bool) {
        lock(&self.shared.state).supply.set_in_use(in_use);
        self.shared.work.notify_one();
    }

    /// Has so many of the next attempts to map something in the region fail, for want of memory.
    #[cfg(test)]
    pub(super) fn refuse_maps(&self, attempts: u32) {
        self.shared.region.refusals.store(attempts, std::sync::atomic::Ordering::Relaxed);
    }

    /// The chunk whose memory lies in this process at `address`, all `len` bytes of it.
    pub(crate) fn find(&self, address: usize, len: usize) -> Option<u32> {
        self.shared.region.index(address).filter(|_| len as u64 == self.shared.chunk_size)
    }

    /// Whether there is a chunk of this index that the guest sees.
    pub(crate) fn is_backed(&self, index: u32) -> bool {
        matches!(lock(&self.shared.state).places.get(index as usize), Some(ChunkPlace::Backed(_)))
    }

    /// The memory of chunk `index`, which is backed; of another, it may be anything that belongs to nobody, or not
    /// accessible.
    pub(crate) fn chunk(&self, index: u32) -> Option<VolatileSlice<'_>> {
        self.shared.region.slice(index)
    }

    /// A descriptor of a backed chunk for the process that does DMA in its place, which may do what `permissions` say and
    /// no more. From then on the chunk goes to nobody else: it is not parked, and its memory is given up with it.
    /// `None` where there can be no such descriptor: for memory that is to be written but not read.
    ///
    /// # Errors
    /// There is no such chunk, or the kernel refused.
    pub(crate) fn hand_out(&self, index: u32, permissions: Permissions) -> io::Result<Option<OwnedFd>> {
        match lock(&self.shared.state).places.get_mut(index as usize) {
            Some(ChunkPlace::Backed(chunk)) => chunk.hand_out(permissions),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// The guest sees the region at `address` from now on. The slots of all places that ever were backed move there.
    ///
    /// # Errors
    /// The platform refuses. The guest sees a place where it was if its slot could not be removed, and nowhere if no other
    /// could be made.
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

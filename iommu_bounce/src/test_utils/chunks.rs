// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Window chunks for tests.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vm_memory::{Bytes, MmapRegion, VolatileMemory, VolatileSlice};

use super::MapperProbe;
use crate::{ChunkError, ChunkStore};

#[derive(Debug, Default)]
struct State {
    backed: u32,
    peak: u32,
    fail_back: Option<bool>,
    fail_release: bool,
    fail_park: bool,
    parked: u32,
    recovers: bool,
    recoveries: u64,
    failures: u64,
    watched: Vec<MapperProbe>,
}

/// [`ChunkStore`] on anonymous memory. `back` returns the lowest free index.
///
/// # Panics
/// `release` panics if the chunk is not backed, or if a watched mapper still maps it.
#[derive(Debug)]
pub struct TestChunks {
    chunk_size: u64,
    chunks: u32,
    backed: BTreeMap<u32, MmapRegion<()>>,
    /// Memory of released chunks. The memory stays mapped, so that no other chunk gets the same address. So an address identifies a chunk.
    released: Vec<MmapRegion<()>>,
    lost: VecDeque<u32>,
    parked: Vec<u32>,
    probe: ChunkProbe,
}

/// Handle that controls a [`TestChunks`] while the engine owns the store.
#[derive(Clone, Debug)]
pub struct ChunkProbe(Arc<Mutex<State>>);

impl TestChunks {
    /// Creates a store of `chunks` chunks of `chunk_size` bytes.
    pub fn new(chunk_size: u64, chunks: u32) -> Self {
        Self {
            chunk_size,
            chunks,
            backed: BTreeMap::new(),
            released: Vec::new(),
            lost: VecDeque::new(),
            parked: Vec::new(),
            probe: ChunkProbe(Arc::default()),
        }
    }

    /// Returns a handle of this store that stays valid when the engine takes the store.
    pub fn probe(&self) -> ChunkProbe {
        self.probe.clone()
    }
}

impl ChunkProbe {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of backed chunks, including lost chunks.
    pub fn backed(&self) -> u32 {
        self.state().backed
    }

    /// Returns the maximum number of chunks that were backed at the same time.
    pub fn peak(&self) -> u32 {
        self.state().peak
    }

    /// Makes the next `back` fail with [`ChunkError::Host`].
    pub fn fail_back(&self) {
        self.state().fail_back = Some(false);
    }

    /// Makes the next `back` fail with [`ChunkError::NoResources`].
    pub fn exhaust_back(&self) {
        self.state().fail_back = Some(true);
    }

    /// Returns the number of calls that failed on request.
    pub fn failures(&self) -> u64 {
        self.state().failures
    }

    /// Makes `release` check that this mapper has unmapped the chunk.
    pub fn watch(&self, mapper: MapperProbe) {
        self.state().watched.push(mapper);
    }

    /// Sets whether `recover` can release lost chunks. Initially, `recover` cannot release them.
    pub fn set_recovers(&self, recovers: bool) {
        self.state().recovers = recovers;
    }

    /// Returns the number of calls of `recover` while a chunk was lost.
    pub fn recoveries(&self) -> u64 {
        self.state().recoveries
    }

    /// Cancels all requested failures.
    pub fn heal(&self) {
        let mut state = self.state();
        state.fail_back = None;
        state.fail_release = false;
        state.fail_park = false;
    }

    /// Makes the next `park` or `unpark` fail.
    pub fn fail_park(&self) {
        self.state().fail_park = true;
    }

    /// Returns the number of parked chunks.
    pub fn parked(&self) -> u32 {
        self.state().parked
    }

    /// Makes the next `release` fail.
    pub fn fail_release(&self) {
        self.state().fail_release = true;
    }
}

impl ChunkStore for TestChunks {
    fn chunk_size(&self) -> u64 {
        self.chunk_size
    }

    fn region_size(&self) -> u64 {
        u64::from(self.chunks) * self.chunk_size
    }

    fn back(&mut self) -> Result<u32, ChunkError> {
        let mut state = self.probe.state();
        state.failures += u64::from(state.fail_back.is_some());
        match state.fail_back.take() {
            Some(true) => return Err(ChunkError::NoResources),
            Some(false) => return Err(io::Error::from_raw_os_error(5).into()),
            None => {}
        }
        let free = (0..self.chunks).find(|index| !self.backed.contains_key(index));
        let index = free.ok_or(ChunkError::NoResources)?;
        drop(state);
        self.back_at(index)?;
        Ok(index)
    }

    fn back_at(&mut self, index: u32) -> Result<(), ChunkError> {
        if index >= self.chunks || self.backed.contains_key(&index) {
            return Err(io::Error::from(io::ErrorKind::InvalidInput).into());
        }
        let mut state = self.probe.state();
        let size = usize::try_from(self.chunk_size).map_err(|_| ChunkError::NoResources)?;
        let region = MmapRegion::new(size).map_err(io::Error::other)?;
        self.backed.insert(index, region);
        state.backed += 1;
        state.peak = state.peak.max(state.backed);
        Ok(())
    }

    fn memory(&self, index: u32) -> Option<VolatileSlice<'_>> {
        let region = self.backed.get(&index).filter(|_| !self.parked.contains(&index))?;
        Some(region.as_volatile_slice())
    }

    fn park(&mut self, index: u32) -> Result<(), ChunkError> {
        let mut state = self.probe.state();
        let region = self.backed.get(&index).expect("only a backed chunk is parked");
        state.failures += u64::from(state.fail_park);
        if std::mem::take(&mut state.fail_park) {
            return Err(io::Error::from_raw_os_error(5).into());
        }
        region.as_volatile_slice().write_slice(&vec![0; region.size()], 0).map_err(io::Error::other)?;
        if !self.parked.contains(&index) {
            self.parked.push(index);
            state.parked += 1;
        }
        Ok(())
    }

    fn unpark(&mut self, index: u32) -> Result<(), ChunkError> {
        let mut state = self.probe.state();
        let place = self.parked.iter().position(|parked| *parked == index);
        let place = place.expect("only a parked chunk is unparked");
        state.failures += u64::from(state.fail_park);
        if std::mem::take(&mut state.fail_park) {
            return Err(io::Error::from_raw_os_error(5).into());
        }
        self.parked.remove(place);
        state.parked -= 1;
        Ok(())
    }

    fn release(&mut self, index: u32) -> Result<(), ChunkError> {
        let mut state = self.probe.state();
        let known = self.backed.get(&index);
        let known = known.filter(|_| !self.lost.contains(&index));
        let region = known.expect("only a backed chunk is released");
        let start = region.as_ptr().addr();
        let memory = start..start + region.size();
        for mapper in &state.watched {
            for (iova, mapping) in mapper.mappings() {
                let reached = memory.contains(&mapping.host_address);
                assert!(!reached, "release of chunk {index}, mapped at {iova:#x}");
            }
        }
        if let Some(place) = self.parked.iter().position(|parked| *parked == index) {
            self.parked.remove(place);
            state.parked -= 1;
        }
        if std::mem::take(&mut state.fail_release) {
            state.failures += 1;
            self.lost.push_back(index);
            return Err(io::Error::from_raw_os_error(5).into());
        }
        self.released.extend(self.backed.remove(&index));
        state.backed -= 1;
        Ok(())
    }

    fn recover(&mut self) -> Option<u32> {
        let index = self.lost.pop_front()?;
        let mut state = self.probe.state();
        state.recoveries += 1;
        if !state.recovers {
            self.lost.push_back(index);
            return None;
        }
        self.released.extend(self.backed.remove(&index));
        state.backed -= 1;
        Some(index)
    }
}

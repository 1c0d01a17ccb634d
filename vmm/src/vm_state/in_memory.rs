// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! State of a VM in the memory of this process.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use carom_api::{CheckedConfig, VmConfig};
use devices::state::StateError;
use vm_memory::VolatileSlice;

use super::{MemoryFile, StateSink, StateSource, VmState, VmStateError};

/// Destination that keeps the state of a VM in memory.
#[derive(Debug, Default)]
pub struct InMemorySink {
    memory: Vec<u8>,
    finished: Option<(VmConfig, VmState)>,
}

/// Saved state of a VM in memory, to be restored.
#[derive(Debug)]
pub struct InMemorySource {
    config: CheckedConfig,
    state: VmState,
    memory: Vec<u8>,
}

impl InMemorySink {
    /// Returns the saved state.
    ///
    /// # Errors
    /// The state was not saved completely, or is invalid.
    pub fn into_source(self) -> Result<InMemorySource, VmStateError> {
        let Self { memory, finished } = self;
        let (config, state) = finished.ok_or_else(|| StateError::rule("state", "was not saved completely"))?;
        let config = config.check_again()?;
        let vcpus = config.cpus.boot_vcpus..=config.cpus.max_vcpus;
        state.check(&vcpus, &config.memory, memory.len() as u64)?;
        Ok(InMemorySource { config, state, memory })
    }

    /// Adds `len` bytes, which `fill` writes. Returns the offset of the first byte.
    fn add(&mut self, len: usize, fill: impl FnOnce(&mut [u8]) -> io::Result<()>) -> Result<u64, VmStateError> {
        let start = self.memory.len();
        self.memory.resize(start + len, 0);
        fill(&mut self.memory[start..]).map_err(|error| StateError::rule("ram", format!("cannot be read: {error}")))?;
        Ok(start as u64)
    }
}

impl StateSink for InMemorySink {
    fn append(&mut self, memory: &VolatileSlice<'_>) -> Result<u64, VmStateError> {
        self.add(memory.len(), |bytes| {
            memory.copy_to(bytes);
            Ok(())
        })
    }

    fn append_file(&mut self, memory: &File, at: u64, len: usize) -> Result<u64, VmStateError> {
        self.add(len, |bytes| memory.read_exact_at(bytes, at))
    }

    fn finish(&mut self, config: &VmConfig, state: &VmState) -> Result<(), VmStateError> {
        self.finished = Some((config.clone(), state.clone()));
        Ok(())
    }
}

impl StateSource for InMemorySource {
    fn config(&self) -> &CheckedConfig {
        &self.config
    }

    fn state(&self) -> &VmState {
        &self.state
    }

    fn read(&self, offset: u64, memory: &VolatileSlice<'_>) -> Result<(), VmStateError> {
        let bytes = usize::try_from(offset).ok().and_then(|at| self.memory.get(at..)?.get(..memory.len()));
        let bytes = bytes.ok_or_else(|| StateError::rule("ram", "is longer than the saved bytes of memory"))?;
        memory.copy_from(bytes);
        Ok(())
    }

    fn file(&self) -> Option<MemoryFile<'_>> {
        None
    }
}

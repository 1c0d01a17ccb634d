// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Destination of a VM's state.

use std::fs::File;

use carom_api::VmConfig;
use vm_memory::VolatileSlice;

use super::{VmState, VmStateError};

/// Destination of a VM's state. The caller first appends the memory contents, then calls [`finish`](Self::finish) once.
pub trait StateSink {
    /// Appends the bytes of `memory`, whose length is a multiple of the page size. Returns the offset of the first byte.
    ///
    /// # Errors
    /// The bytes cannot be written, for example to a full disk.
    fn append(&mut self, memory: &VolatileSlice<'_>) -> Result<u64, VmStateError>;

    /// Appends `len` bytes of the file `memory` from `at` on. `len` is a multiple of the page size. Returns the offset of the first byte.
    /// `memory` is the file of shared memory. Reading this file keeps the holes, whereas reading a mapping would allocate pages.
    ///
    /// # Errors
    /// As for [`append`](Self::append).
    fn append_file(&mut self, memory: &File, at: u64, len: usize) -> Result<u64, VmStateError>;

    /// Completes the state. On error, the destination contains no state.
    ///
    /// # Errors
    /// The configuration or the state cannot be written.
    fn finish(&mut self, config: &VmConfig, state: &VmState) -> Result<(), VmStateError>;
}

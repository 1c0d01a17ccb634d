// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Source of a VM's state.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;

use carom_api::CheckedConfig;
use devices::file_size;
use vm_memory::VolatileSlice;

use super::{VmState, VmStateError};

/// Source of a VM's state. The state is validated as far as possible without a VM.
pub trait StateSource {
    /// Returns the configuration of the VM.
    fn config(&self) -> &CheckedConfig;

    /// Returns the state of the VM.
    fn state(&self) -> &VmState;

    /// Copies the bytes from `offset` on into `memory`, which must be all zero.
    ///
    /// # Errors
    /// The bytes cannot be read, or the source has fewer bytes than `memory`.
    fn read(&self, offset: u64, memory: &VolatileSlice<'_>) -> Result<(), VmStateError>;

    /// Returns the file with the saved memory contents, if the source has such a file. The file does not change, so it can be mapped and
    /// read page by page.
    fn file(&self) -> Option<MemoryFile<'_>>;
}

/// File with the saved memory contents.
#[derive(Clone, Copy, Debug)]
pub struct MemoryFile<'f> {
    /// The file, open for reading.
    pub file: BorrowedFd<'f>,
    /// Path of the file, for error messages.
    pub path: &'f Path,
    /// Length of the file in bytes.
    pub len: u64,
}

impl MemoryFile<'_> {
    /// Makes an error that names the file.
    pub fn error(&self, source: io::Error) -> VmStateError {
        VmStateError::File { path: self.path.display().to_string(), source: file_size::explain(source) }
    }
}

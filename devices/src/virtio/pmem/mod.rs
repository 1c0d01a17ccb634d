// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio-pmem: a file of the host as memory of the guest that keeps what is written (virtio 1.3, section 5.19).
//!
//! The guest reads and writes the mapped file itself, without an exit; what comes by the queue is the wish to have all of it on the
//! host's disk. The memory is a shared memory region, which is a BAR; for drivers that do not know such regions the configuration
//! says where that is.
//!
//! [`spec`] has the numbers of the specification, `device` is what the transport sees, `memory` the mapped file, `requests` the work of
//! the thread that serves the queue, `state` what is saved.

mod counters;
mod device;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod memory;
mod requests;
pub mod spec;
mod state;

#[cfg(test)]
mod tests;

use std::fs::File;
use std::io;
use std::sync::Arc;

use thiserror::Error;

pub use self::counters::PmemCounters;
pub use self::device::{ROLE, VirtioPmem};
use super::{TransportError, VirtioPciDevice, VirtioPciParams};
use crate::dma::DeviceMemory;
use crate::platform::{DeviceObserver, Doorbells, MemorySlots, MsiAllocator};

/// What a virtio-pmem device is made of.
pub struct PmemParams {
    /// Name for logs, threads and the API.
    pub id: String,
    /// The file, open for reading, and for writing too unless writes are discarded.
    pub file: File,
    /// The file's name for messages.
    pub path: String,
    /// Bytes of it that the guest sees, no more than it has: a multiple of [`spec::GRANULE`].
    pub size: u64,
    /// What the guest writes is for it alone, and gone with the device.
    pub discard_writes: bool,
    /// Where the memory is shown.
    pub slots: Arc<dyn MemorySlots>,
    /// What the device sees of memory.
    pub memory: DeviceMemory,
    /// Interrupt vectors.
    pub msi: Arc<dyn MsiAllocator>,
    /// Where notifications are connected.
    pub doorbells: Option<Arc<dyn Doorbells>>,
    /// Who learns when the device is activated, fails and is reset.
    pub observer: Option<Arc<dyn DeviceObserver>>,
}

/// Why there is no device.
#[derive(Debug, Error)]
pub enum PmemError {
    /// The file cannot be mapped.
    #[error("mapping the file: {0}")]
    Map(#[source] io::Error),
    /// It could not be put on PCI.
    #[error(transparent)]
    Transport(#[from] TransportError),
}

/// Makes a virtio-pmem device: the PCI function, and the device by which its counters are read.
///
/// # Errors
/// The file cannot be mapped, the process can have no more descriptors, or the platform has no interrupt vectors.
pub fn create(params: PmemParams) -> Result<(Arc<VirtioPciDevice>, Arc<VirtioPmem>), PmemError> {
    let PmemParams { id, file, path, size, discard_writes, slots, memory, msi, doorbells, observer } = params;
    let device = Arc::new(VirtioPmem::new(&id, file, &path, size, discard_writes, slots)?);
    let function =
        VirtioPciDevice::new(VirtioPciParams { id, device: device.clone(), memory, msi, doorbells, observer })?;
    Ok((Arc::new(function), device))
}

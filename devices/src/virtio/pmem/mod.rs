// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio-pmem: a host file as persistent memory of the guest (virtio 1.3, section 5.19).
//!
//! The guest reads and writes the mapped file directly, without exits. The queue carries only flush requests. A flush makes all written
//! data durable on the host's disk. The memory is a shared memory region in a BAR. For drivers that do not support shared memory regions,
//! the device configuration contains the memory's address.
//!
//! [`spec`] contains the specification's constants, and `device` is the interface to the transport. `memory` is the mapped file, `requests`
//! is the task of the queue's thread, and `state` is the saved state.

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

/// Parameters of a virtio-pmem device.
pub struct PmemParams {
    /// Name of the device in logs, thread names and the API.
    pub id: String,
    /// File that backs the memory. The file must be open for reading. It must also be open for writing, unless `discard_writes` is true.
    pub file: File,
    /// Name of the file in messages.
    pub path: String,
    /// Number of bytes of the file that the guest can access: a multiple of [`spec::GRANULE`], and at most the size of the file.
    pub size: u64,
    /// True if the device discards the guest's writes: they do not reach the file, and are lost when the device is removed.
    pub discard_writes: bool,
    /// Platform interface that registers the memory as a KVM memory slot.
    pub slots: Arc<dyn MemorySlots>,
    /// Guest memory that the device can access.
    pub memory: DeviceMemory,
    /// Allocator of interrupt vectors.
    pub msi: Arc<dyn MsiAllocator>,
    /// Platform interface that lets notifications wake the queues' threads without exits. `None` if each notification exits to the VMM.
    pub doorbells: Option<Arc<dyn Doorbells>>,
    /// Observer that is notified when the device is activated, fails or is reset.
    pub observer: Option<Arc<dyn DeviceObserver>>,
}

/// Reason why the device cannot be created.
#[derive(Debug, Error)]
pub enum PmemError {
    /// The file cannot be mapped.
    #[error("cannot map the file: {0}")]
    Map(#[source] io::Error),
    /// The PCI function cannot be created.
    #[error(transparent)]
    Transport(#[from] TransportError),
}

/// Creates a virtio-pmem device. Returns the PCI function and the device. The caller uses the device to read the counters.
///
/// # Errors
/// The file cannot be mapped, the process has no free file descriptor, or the platform has no free interrupt vector.
pub fn create(params: PmemParams) -> Result<(Arc<VirtioPciDevice>, Arc<VirtioPmem>), PmemError> {
    let PmemParams { id, file, path, size, discard_writes, slots, memory, msi, doorbells, observer } = params;
    let device = Arc::new(VirtioPmem::new(&id, file, &path, size, discard_writes, slots)?);
    let function =
        VirtioPciDevice::new(VirtioPciParams { id, device: device.clone(), memory, msi, doorbells, observer })?;
    Ok((Arc::new(function), device))
}

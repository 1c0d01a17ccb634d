// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio-rng: gives the guest random bytes from the host (virtio 1.3, section 5.4).
//!
//! This is the smallest device, and a model for new devices. [`spec`] contains the specification's constants, and `device` is the interface
//! to the transport. `requests` is the task of the queue's thread, and `state` is the saved state.

mod counters;
mod device;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod requests;
pub mod spec;
mod state;

#[cfg(test)]
mod tests;

use std::fs::File;
use std::sync::Arc;

pub use self::counters::RngCounters;
pub use self::device::{ROLE, VirtioRng};
use super::{TransportError, VirtioPciDevice, VirtioPciParams};
use crate::dma::DeviceMemory;
use crate::platform::{DeviceObserver, Doorbells, MsiAllocator};

/// Parameters of a virtio-rng device.
pub struct RngParams {
    /// Name of the device in logs, thread names and the API.
    pub id: String,
    /// Source of random bytes: a file that the device reads from the file's current offset. The file must be open with `O_NONBLOCK`, so
    /// that reads do not block.
    pub source: File,
    /// Guest memory that the device can access.
    pub memory: DeviceMemory,
    /// Allocator of interrupt vectors.
    pub msi: Arc<dyn MsiAllocator>,
    /// Platform interface that lets notifications wake the queues' threads without exits. `None` if each notification exits to the VMM.
    pub doorbells: Option<Arc<dyn Doorbells>>,
    /// Observer that is notified when the device is activated, fails or is reset.
    pub observer: Option<Arc<dyn DeviceObserver>>,
}

/// Creates a virtio-rng device. Returns the PCI function and the device. The caller uses the device to read the counters.
///
/// # Errors
/// The process has no free file descriptor, or the platform has no free interrupt vector.
pub fn create(params: RngParams) -> Result<(Arc<VirtioPciDevice>, Arc<VirtioRng>), TransportError> {
    let RngParams { id, source, memory, msi, doorbells, observer } = params;
    let device = Arc::new(VirtioRng::new(&id, source).map_err(TransportError::Descriptors)?);
    let function =
        VirtioPciDevice::new(VirtioPciParams { id, device: device.clone(), memory, msi, doorbells, observer })?;
    Ok((Arc::new(function), device))
}

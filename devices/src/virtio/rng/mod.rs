// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio-rng: random bytes of the host for the guest (virtio 1.3, section 5.4).
//!
//! The smallest device that there is, and the pattern for others: [`spec`] has the numbers of the specification, `device` is
//! what the transport sees, `requests` the work of the thread that serves the queue, `state` what is saved of it.

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

/// What a virtio-rng device is made of.
pub struct RngParams {
    /// Name for logs, threads and the API.
    pub id: String,
    /// Where random bytes come from: a file that is read from where it stands, opened such that reading it does not wait
    /// (`O_NONBLOCK`).
    pub source: File,
    /// What the device sees of memory.
    pub memory: DeviceMemory,
    /// Interrupt vectors.
    pub msi: Arc<dyn MsiAllocator>,
    /// Where notifications are connected.
    pub doorbells: Option<Arc<dyn Doorbells>>,
    /// Who learns when the device is activated, fails and is reset.
    pub observer: Option<Arc<dyn DeviceObserver>>,
}

/// Makes a virtio-rng device: the PCI function, and the device by which its counters are read.
///
/// # Errors
/// The process can have no more descriptors, or the platform has no interrupt vectors.
pub fn create(params: RngParams) -> Result<(Arc<VirtioPciDevice>, Arc<VirtioRng>), TransportError> {
    let RngParams { id, source, memory, msi, doorbells, observer } = params;
    let device = Arc::new(VirtioRng::new(&id, source).map_err(TransportError::Descriptors)?);
    let function =
        VirtioPciDevice::new(VirtioPciParams { id, device: device.clone(), memory, msi, doorbells, observer })?;
    Ok((Arc::new(function), device))
}

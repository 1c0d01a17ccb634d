// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio-balloon: memory that the guest does without goes back to the host (virtio 1.3, section 5.5), what is in the balloon and what
//! the driver reports as free.
//!
//! [`spec`] has the numbers of the specification, `device` is what the transport sees, `traffic` the work of the thread that serves the
//! queues, `state` what is saved. Which pages may go [`Reclaim`] knows.

mod counters;
mod device;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod spec;
mod state;
mod traffic;

#[cfg(test)]
mod tests;

use std::sync::Arc;

pub use self::counters::BalloonCounters;
pub use self::device::{ROLE, VirtioBalloon};
use super::{TransportError, VirtioPciDevice, VirtioPciParams};
use crate::dma::DeviceMemory;
use crate::platform::{DeviceObserver, Doorbells, MsiAllocator};
use crate::reclaim::Reclaim;

/// What a virtio-balloon device is made of.
pub struct BalloonParams {
    /// Name for logs, threads and the API.
    pub id: String,
    /// Bytes that the balloon should have, of which whole pages count.
    pub size: u64,
    /// Whether the driver may take pages out by itself when the guest is out of memory.
    pub deflate_on_oom: bool,
    /// Whether the driver is to tell of pages that are free.
    pub free_page_reporting: bool,
    /// By which pages go back to the host.
    pub reclaim: Arc<Reclaim>,
    /// What the device sees of memory: guest-physical addresses are in its queues, so all RAM.
    pub memory: DeviceMemory,
    /// Interrupt vectors.
    pub msi: Arc<dyn MsiAllocator>,
    /// Where notifications are connected.
    pub doorbells: Option<Arc<dyn Doorbells>>,
    /// Who learns when the device is activated, fails and is reset.
    pub observer: Option<Arc<dyn DeviceObserver>>,
}

/// Makes a virtio-balloon device: the PCI function, and the device by which it is resized and read.
///
/// # Errors
/// The process can have no more descriptors, or the platform has no interrupt vectors.
pub fn create(params: BalloonParams) -> Result<(Arc<VirtioPciDevice>, Arc<VirtioBalloon>), TransportError> {
    let device = Arc::new(VirtioBalloon::new(&params).map_err(TransportError::Descriptors)?);
    let BalloonParams { id, memory, msi, doorbells, observer, .. } = params;
    let function =
        VirtioPciDevice::new(VirtioPciParams { id, device: device.clone(), memory, msi, doorbells, observer })?;
    Ok((Arc::new(function), device))
}

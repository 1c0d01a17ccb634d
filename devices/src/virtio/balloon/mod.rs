// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio-balloon: returns guest memory to the host (virtio 1.3, section 5.5). The device returns the pages that the driver adds to the
//! balloon, and the pages that the driver reports as free.
//!
//! [`spec`] contains the specification's constants, and `device` is the interface to the transport. `traffic` is the task of the thread
//! that serves the queues, and `state` is the saved state. [`Reclaim`] decides which pages can be returned.

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

/// Parameters of a virtio-balloon device.
pub struct BalloonParams {
    /// Name of the device in logs, thread names and the API.
    pub id: String,
    /// Target size of the balloon in bytes. The device rounds the size down to whole pages.
    pub size: u64,
    /// True if the driver may shrink the balloon by itself when the guest is out of memory.
    pub deflate_on_oom: bool,
    /// True if the driver may report free pages.
    pub free_page_reporting: bool,
    /// Component that returns pages to the host.
    pub reclaim: Arc<Reclaim>,
    /// Guest memory that the device can access. The device must be able to access all of the guest's RAM, because the queues contain
    /// guest-physical addresses.
    pub memory: DeviceMemory,
    /// Allocator of interrupt vectors.
    pub msi: Arc<dyn MsiAllocator>,
    /// Platform interface that lets notifications wake the queues' threads without exits. `None` if each notification exits to the VMM.
    pub doorbells: Option<Arc<dyn Doorbells>>,
    /// Observer that is notified when the device is activated, fails or is reset.
    pub observer: Option<Arc<dyn DeviceObserver>>,
}

/// Creates a virtio-balloon device. Returns the PCI function and the device. The caller uses the device to resize the balloon and to read
/// the counters.
///
/// # Errors
/// The process has no free file descriptor, or the platform has no free interrupt vector.
pub fn create(params: BalloonParams) -> Result<(Arc<VirtioPciDevice>, Arc<VirtioBalloon>), TransportError> {
    let device = Arc::new(VirtioBalloon::new(&params).map_err(TransportError::Descriptors)?);
    let BalloonParams { id, memory, msi, doorbells, observer, .. } = params;
    let function =
        VirtioPciDevice::new(VirtioPciParams { id, device: device.clone(), memory, msi, doorbells, observer })?;
    Ok((Arc::new(function), device))
}

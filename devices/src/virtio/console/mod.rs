// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio-console: a terminal for the guest (virtio 1.3, section 5.3). The device has a single port.
//!
//! [`spec`] contains the specification's constants, and `device` is the interface to the transport. `ends` is the host's side of the
//! console, which the device and its thread share. `traffic` is the task of the thread that serves the queues, and `state` is the saved
//! state.

mod counters;
mod device;
mod ends;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod spec;
mod state;
mod traffic;

#[cfg(test)]
mod tests;

use std::io::Write;
use std::sync::Arc;

pub use self::counters::ConsoleCounters;
pub use self::device::{ROLE, VirtioConsole};
pub use self::ends::Size;
use super::{TransportError, VirtioPciDevice, VirtioPciParams};
use crate::dma::DeviceMemory;
use crate::platform::{DeviceObserver, Doorbells, MsiAllocator};

/// Parameters of a virtio-console device.
pub struct ConsoleParams {
    /// Name of the device in logs, thread names and the API.
    pub id: String,
    /// Destination of the guest's output. The device writes pieces of at most 256 bytes. A write must not block for long, because a pause
    /// of the VM waits for the write.
    pub output: Box<dyn Write + Send>,
    /// Guest memory that the device can access.
    pub memory: DeviceMemory,
    /// Allocator of interrupt vectors.
    pub msi: Arc<dyn MsiAllocator>,
    /// Platform interface that lets notifications wake the queues' threads without exits. `None` if each notification exits to the VMM.
    pub doorbells: Option<Arc<dyn Doorbells>>,
    /// Observer that is notified when the device is activated, fails or is reset.
    pub observer: Option<Arc<dyn DeviceObserver>>,
}

/// Creates a virtio-console device. Returns the PCI function and the device. The caller uses the device to pass input to the guest and to
/// read the counters.
///
/// # Errors
/// The process has no free file descriptor, or the platform has no free interrupt vector.
pub fn create(params: ConsoleParams) -> Result<(Arc<VirtioPciDevice>, Arc<VirtioConsole>), TransportError> {
    let ConsoleParams { id, output, memory, msi, doorbells, observer } = params;
    let device = Arc::new(VirtioConsole::new(&id, output).map_err(TransportError::Descriptors)?);
    let function =
        VirtioPciDevice::new(VirtioPciParams { id, device: device.clone(), memory, msi, doorbells, observer })?;
    Ok((Arc::new(function), device))
}

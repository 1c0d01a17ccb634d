// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio-console: a terminal for the guest (virtio 1.3, section 5.3), with one port.
//!
//! [`spec`] has the numbers of the specification, `device` is what the transport sees, `ends` what device and thread share, `traffic` the
//! work of the thread that serves the queues, `state` what is saved.

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

/// What a virtio-console device is made of.
pub struct ConsoleParams {
    /// Name for logs, threads and the API.
    pub id: String,
    /// Where the guest's output goes, in pieces of 256 bytes at most. One write must not wait for long: a pause of the VM waits for it.
    pub output: Box<dyn Write + Send>,
    /// What the device sees of memory.
    pub memory: DeviceMemory,
    /// Interrupt vectors.
    pub msi: Arc<dyn MsiAllocator>,
    /// Where notifications are connected.
    pub doorbells: Option<Arc<dyn Doorbells>>,
    /// Who learns when the device is activated, fails and is reset.
    pub observer: Option<Arc<dyn DeviceObserver>>,
}

/// Makes a virtio-console device: the PCI function, and the device by which input comes and its counters are read.
///
/// # Errors
/// The process can have no more descriptors, or the platform has no interrupt vectors.
pub fn create(params: ConsoleParams) -> Result<(Arc<VirtioPciDevice>, Arc<VirtioConsole>), TransportError> {
    let ConsoleParams { id, output, memory, msi, doorbells, observer } = params;
    let device = Arc::new(VirtioConsole::new(&id, output).map_err(TransportError::Descriptors)?);
    let function =
        VirtioPciDevice::new(VirtioPciParams { id, device: device.clone(), memory, msi, doorbells, observer })?;
    Ok((Arc::new(function), device))
}

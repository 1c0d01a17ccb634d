// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio-vsock: stream sockets between guest and host (virtio 1.4, section 5.10). On the host, these sockets are Unix sockets.
//!
//! A host program connects to the device's socket and sends `CONNECT <port>`. The device then connects the program to this port of the
//! guest. If a guest program connects to a port of CID 2 (the host), the device connects the guest program to the host socket
//! `<socket>_<port>`. Carom needs neither a kernel module nor privileges for these sockets. Guests cannot connect to each other.
//!
//! `device` is the interface to the transport. One thread runs `traffic`: it reads and writes packets (`packet`) and passes them to the
//! `hub`. The hub manages the connections (`connection`). `credit` implements the flow control, and `unix` implements the host's side. The
//! host kernel copies data only between sockets and buffers of this process. The host kernel never accesses the guest's memory.

mod connection;
mod counters;
mod credit;
mod device;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
mod hub;
mod packet;
pub mod spec;
mod state;
mod traffic;
mod unix;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use self::counters::Counts;
pub use self::counters::VsockCounters;
pub use self::device::{ROLE, VirtioVsock};
use self::hub::Ends;
pub use self::hub::{MOST_CLIENTS, MOST_CONNECTIONS};
pub use self::unix::Listener;
use super::{TransportError, VirtioPciDevice, VirtioPciParams};
use crate::dma::DeviceMemory;
use crate::platform::{DeviceObserver, Doorbells, MsiAllocator};

/// Parameters of a vsock device.
pub struct VsockParams {
    /// Name of the device in logs, thread names and the API.
    pub id: String,
    /// CID of the guest, at least 3.
    pub cid: u32,
    /// Socket that host programs connect to.
    pub listener: Listener,
    /// Maximum number of connections. Each connection uses a file descriptor. [`MOST_CONNECTIONS`] is the upper bound.
    pub connections: usize,
    /// Guest memory that the device can access.
    pub memory: DeviceMemory,
    /// Allocator of interrupt vectors.
    pub msi: Arc<dyn MsiAllocator>,
    /// Platform interface that connects the doorbells of queues. `None` if each notification exits to the VMM.
    pub doorbells: Option<Arc<dyn Doorbells>>,
    /// Observer that is notified when the device is activated, fails or is reset.
    pub observer: Option<Arc<dyn DeviceObserver>>,
}

/// Creates a vsock device. Returns the PCI function and the device. The caller uses the device to read the counters.
///
/// # Errors
/// The process has no free file descriptor, or the platform has no free interrupt vector.
pub fn create(params: VsockParams) -> Result<(Arc<VirtioPciDevice>, Arc<VirtioVsock>), TransportError> {
    let VsockParams { id, cid, listener, connections, memory, msi, doorbells, observer } = params;
    let connections = connections.min(MOST_CONNECTIONS);
    let ends = Ends { cid: cid.into(), listener, connections, counts: Counts::default() };
    let device = Arc::new(VirtioVsock::new(&id, ends).map_err(TransportError::Descriptors)?);
    let function =
        VirtioPciDevice::new(VirtioPciParams { id, device: device.clone(), memory, msi, doorbells, observer })?;
    Ok((Arc::new(function), device))
}

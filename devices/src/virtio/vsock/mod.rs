// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio-vsock: stream sockets between guest and host (virtio 1.4, section 5.10), of which the host's side are Unix sockets.
//!
//! A program of the host connects to the device's socket, says `CONNECT <port>`, and is connected with the guest's port. A program of the
//! guest that connects to a port of CID 2 is connected with the socket `<socket>_<port>`. No kernel module and no right is needed on the host, and
//! guests cannot reach each other.
//!
//! `device` is what the transport sees. One thread does its `traffic`: it reads and writes packets (`packet`) and hands them to the
//! `hub`, which has the connections (`connection`, with `credit` for what either side may send, `unix` for the host's side). The host's
//! kernel copies between sockets and memory of this process, never the guest's.

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

/// What a vsock device is made of.
pub struct VsockParams {
    /// Name for logs, threads and the API.
    pub id: String,
    /// CID of the guest, 3 at least.
    pub cid: u32,
    /// Where the host's programs connect.
    pub listener: Listener,
    /// Most connections, of which each has a descriptor: no more than [`MOST_CONNECTIONS`] in any case.
    pub connections: usize,
    /// What the device sees of memory.
    pub memory: DeviceMemory,
    /// Interrupt vectors.
    pub msi: Arc<dyn MsiAllocator>,
    /// Where notifications are connected.
    pub doorbells: Option<Arc<dyn Doorbells>>,
    /// Who learns when the device is activated, fails and is reset.
    pub observer: Option<Arc<dyn DeviceObserver>>,
}

/// Makes a vsock device: the PCI function, and the device by which its counters are read.
///
/// # Errors
/// The process can have no more descriptors, or the platform has no interrupt vectors.
pub fn create(params: VsockParams) -> Result<(Arc<VirtioPciDevice>, Arc<VirtioVsock>), TransportError> {
    let VsockParams { id, cid, listener, connections, memory, msi, doorbells, observer } = params;
    let connections = connections.min(MOST_CONNECTIONS);
    let ends = Ends { cid: cid.into(), listener, connections, counts: Counts::default() };
    let device = Arc::new(VirtioVsock::new(&id, ends).map_err(TransportError::Descriptors)?);
    let function =
        VirtioPciDevice::new(VirtioPciParams { id, device: device.clone(), memory, msi, doorbells, observer })?;
    Ok((Arc::new(function), device))
}

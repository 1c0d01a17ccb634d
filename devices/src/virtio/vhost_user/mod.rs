// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! vhost-user: virtio devices that another host process, the *server*, serves (QEMU's `docs/interop/vhost-user.rst`). The server can access
//! all guest RAM. Apart from this, the front end does not trust the server: the server must not be able to harm the Carom process.
//!
//! Carom is the front end: it implements the PCI function. When a driver is ready, the front end sends the driver's settings to the server:
//! accepted features, memory and queues. From then on, notifications and interrupts bypass the front end: KVM writes the eventfds that
//! notify the server, and reads the eventfds that interrupt the guest.
//!
//! * `connection` sends requests. Each request has a time limit ([`time_limit`]).
//! * `offer` describes the capabilities of a server.
//! * `session` connects the driver and the server.
//! * `watcher` is a thread that notices the loss of a server and connects to the next server.
//! * `fs`, `block` and `net` describe the device types. The front end itself serves the control queue of a network card
//!   (`control_queue`).
//!
//! Behind the virtio-iommu, the server uses IOVAs. The server asks for translations on the `back_channel`. The engine maps and unmaps
//! through `mapper`. `translation` tracks the translations that the server has. The front end sends and invalidates translations under the
//! session's lock, and `precedence` decides which thread takes this lock first.

mod back_channel;
mod block;
mod connection;
mod control_queue;
mod counters;
mod device;
mod error;
mod events;
mod fs;
mod iotlb;
mod kicker;
mod link;
mod mapper;
mod model;
mod net;
mod offer;
mod precedence;
mod session;
pub mod spec;
mod time_limit;
mod translation;
mod watcher;

#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;

use thiserror::Error;

use self::connection::Times;
pub use self::counters::VhostUserCounters;
pub use self::device::VhostUserDevice;
pub use self::error::ServerError;
use self::link::Address;
pub use self::mapper::VhostUserMapper;
pub use self::model::Model;
pub use self::net::ServedNet;
use super::{TransportError, VirtioPciDevice, VirtioPciParams};
use crate::dma::{DeviceMemory, DmaTable};
use crate::platform::{DeviceObserver, Doorbells, MsiAllocator};
use crate::ram::Ram;
use crate::sandbox::{Call, ThreadRole, calls};

/// System calls that create a socket pair. The front end sends one end of the pair to the server.
const SOCKET_PAIRS: &[Call] = &[calls::unix_stream(libc::SYS_socketpair)];

/// Role of the threads of a device:
/// * The watcher waits for events of the server. After a loss, the watcher connects to the next server and sends the device's state.
/// * The control queue's thread sends the number of queue pairs that a driver uses.
/// * The time limit's thread closes a connection whose server takes too long.
/// * The kicker's thread notifies the server.
pub const ROLE: ThreadRole = ThreadRole { name: "vhost-user", calls: &[calls::MESSAGES, calls::SOCKETS, SOCKET_PAIRS] };

/// Parameters of a vhost-user device.
pub struct VhostUserParams {
    /// Name of the device in logs, thread names and the API.
    pub id: String,
    /// Path of the socket at which the server listens.
    pub socket: PathBuf,
    /// Description of the device.
    pub model: Model,
    /// Guest RAM, backed by shareable files. The server receives the files of all RAM.
    pub ram: Arc<Ram>,
    /// Mappings of guest RAM for the device, if the device is behind the virtio-iommu.
    pub table: Option<Arc<DmaTable>>,
    /// Allocator of interrupt vectors.
    pub msi: Arc<dyn MsiAllocator>,
    /// Platform interface that connects the doorbells of queues.
    pub doorbells: Option<Arc<dyn Doorbells>>,
    /// Observer that is notified when the device is activated, fails or is reset.
    pub observer: Option<Arc<dyn DeviceObserver>>,
}

/// New vhost-user device.
pub struct VhostUser {
    /// PCI function of the device.
    pub function: Arc<VirtioPciDevice>,
    /// Device, for adding RAM and reading counters.
    pub device: Arc<VhostUserDevice>,
    /// Mapper that fills the device's table of mappings. `None` if the device is not behind the virtio-iommu.
    pub mapper: Option<VhostUserMapper>,
}

/// Error when a vhost-user device is created.
#[derive(Debug, Error)]
pub enum VhostUserError {
    /// The server is unusable.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// The PCI function cannot be created.
    #[error(transparent)]
    Transport(#[from] TransportError),
}

/// Connects to the server and creates the device.
///
/// # Errors
/// The server does not answer or lacks a capability, or the platform cannot allocate interrupt vectors.
pub fn create(params: VhostUserParams) -> Result<VhostUser, VhostUserError> {
    let VhostUserParams { id, socket, model, ram, table, msi, doorbells, observer } = params;
    let translated = table.is_some();
    let times = if translated { Times::behind_iommu() } else { Times::default() };
    let address = Address::new(id.clone(), socket, model, times, translated);
    let device = Arc::new(VhostUserDevice::connect(address, table.clone())?);
    let memory = table.clone().map_or_else(|| DeviceMemory::all_ram(ram), DeviceMemory::mapped);
    let function =
        VirtioPciDevice::new(VirtioPciParams { id, device: device.clone(), memory, msi, doorbells, observer })?;
    let mapper = table.map(|table| device.mapper(table));
    Ok(VhostUser { function: Arc::new(function), device, mapper })
}

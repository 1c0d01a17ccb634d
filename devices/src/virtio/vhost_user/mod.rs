// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! vhost-user: virtio devices that another process of the host serves (QEMU's `docs/interop/vhost-user.rst`). That process is not
//! trusted with this one, but it reaches all guest RAM.
//!
//! This side is the front end: it has the PCI function, and what is in its registers goes to the *server* when a driver is ready. From
//! then on guest and server are among themselves: notifications go to the server by events that KVM writes, and its interrupts to
//! the guest by events that KVM reads. `connection` makes requests, each within a time ([`time_limit`]); `offer` is what a
//! server has, `session` the device between driver and server, and `watcher` a thread that learns of a server's end. `fs`, `block` and
//! `net` say what a device is; of a network card the front end serves one queue itself (`control_queue`).
//!
//! Behind the virtio-iommu, the server uses addresses of the guest's mappings. It asks for them on the `back_channel`; `mapper` is where
//! the engine maps and unmaps, and `translation` what the server knows of it. A mapping is told and taken back under the session's lock,
//! in which `precedence` says who goes first.

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

/// Sockets whose other end goes to the server.
const SOCKET_PAIRS: &[Call] = &[calls::unix_stream(libc::SYS_socketpair)];

/// Role of the threads of a device. One waits for the server, looks for the next one and sends it the device's state. One sends the
/// pairs of queues that a driver uses. One ends a connection whose server takes too long.
pub const ROLE: ThreadRole = ThreadRole { name: "vhost-user", calls: &[calls::MESSAGES, calls::SOCKETS, SOCKET_PAIRS] };

/// What a vhost-user device is made of.
pub struct VhostUserParams {
    /// Name for logs, threads and the API.
    pub id: String,
    /// Where its server listens.
    pub socket: PathBuf,
    /// What it is.
    pub model: Model,
    /// Guest RAM, of files that can be shared. The server gets all of it.
    pub ram: Arc<Ram>,
    /// Its mappings, if it is behind the virtio-iommu; of the same RAM.
    pub table: Option<Arc<DmaTable>>,
    /// Interrupt vectors.
    pub msi: Arc<dyn MsiAllocator>,
    /// Where notifications are connected.
    pub doorbells: Option<Arc<dyn Doorbells>>,
    /// Who learns when the device is activated, fails and is reset.
    pub observer: Option<Arc<dyn DeviceObserver>>,
}

/// A device that was made.
pub struct VhostUser {
    /// Its PCI function.
    pub function: Arc<VirtioPciDevice>,
    /// The device by which RAM is added and counters are read.
    pub device: Arc<VhostUserDevice>,
    /// What fills its table of mappings, if it has one.
    pub mapper: Option<VhostUserMapper>,
}

/// Why there is no such device.
#[derive(Debug, Error)]
pub enum VhostUserError {
    /// Its server cannot be used.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// It cannot be put on PCI.
    #[error(transparent)]
    Transport(#[from] TransportError),
}

/// Connects to the server, and makes the device.
///
/// # Errors
/// The server is not there or cannot do what is needed, or the platform has no interrupt vectors.
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

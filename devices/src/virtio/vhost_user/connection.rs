// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Connection to a server. The server may be broken or hostile. If a server closes the connection, breaks the protocol, or does not answer
//! a request in time, the server is *gone*. The connection stores the reason, and all later requests fail immediately.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use iommu_bounce::Permissions;
use rustix::io::Errno;
use rustix::net::{SendFlags, send};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Error as WireError, Frontend, VhostUserFrontend};
use vhost::{Error as VhostError, VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vm_memory::{Address, GuestMemoryRegion};
use vmm_sys_util::eventfd::EventFd;

use super::error::ServerError;
use super::iotlb::{BYTES, Iotlb, Kind};
use super::time_limit::TimeLimit;
use crate::peer_timeouts::{Budget, Operation, Peer};
use crate::ram::RamRegion;
use crate::sync::lock;

/// Time limit for all requests of one [`Operation`] together. The draining of queues has its own limit. `TIME` is short, because a vCPU may
/// wait for the operation while the guest has interrupts off.
const TIME: Duration = Duration::from_secs(5);
/// Time limit for a server to complete the requests of a queue.
const DRAIN_TIME: Duration = Duration::from_secs(20);
/// Budget: total time that the servers of a device may block threads. The budget is this fraction (numerator, denominator) of the time
/// limit for draining. A used budget refills slowly.
const BUDGET: (u32, u32) = (3, 2);
/// An answer that takes at most 1/`FREE` of an operation's time limit is not charged to the budget. If an answer takes longer, only the
/// additional time is charged.
const FREE: u32 = 50;

/// `VHOST_USER_IOTLB_MSG`.
const IOTLB_MSG: u32 = 22;
/// Flags of a header: version 1, reply, and "reply wanted".
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// Size of a header in bytes.
const HEADER: usize = 12;

/// Size of a queue and addresses of its rings, as set by the driver. Behind the virtio-iommu, the addresses are IOVAs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rings {
    pub(super) size: u16,
    pub(super) descriptors: u64,
    pub(super) available: u64,
    pub(super) used: u64,
}

/// Memory region that is backed by a part of a file.
pub(super) struct FileRegion {
    /// Address of the region in the server's memory table. The server receives this address as the user address and as the guest-physical
    /// address.
    pub(super) address: u64,
    /// Size in bytes.
    pub(super) len: u64,
    /// Offset in the file.
    pub(super) offset: u64,
    pub(super) file: File,
}

/// Time limits for a server.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    /// Limit for completing the requests of a queue.
    pub(super) drain: Duration,
    /// Limit for all other requests of an operation.
    pub(super) other: Duration,
}

impl Default for Times {
    fn default() -> Self {
        Self { drain: DRAIN_TIME, other: TIME }
    }
}

impl Times {
    /// Returns the limits for a device behind the virtio-iommu. An UNMAP may have to wait until the server has completed the requests of a
    /// queue, so the limit for draining is shorter.
    pub(super) fn behind_iommu() -> Self {
        Self { drain: TIME, other: TIME }
    }

    /// Returns the common budget of all servers of a device. After the loss of a server, the next server continues with what is left of the
    /// budget.
    pub(super) fn budget(self) -> Arc<Mutex<Budget>> {
        let budget = Budget::new(self.drain * BUDGET.0 / BUDGET.1, self.other / FREE, Instant::now());
        Arc::new(Mutex::new(budget))
    }
}

/// Connection to a server.
pub(super) struct Connection {
    frontend: Frontend,
    /// Copy of the socket, for messages that the `vhost` crate does not support.
    socket: UnixStream,
    limit: TimeLimit,
    times: Times,
    peer: Peer,
    /// Common budget of all servers of the device.
    budget: Arc<Mutex<Budget>>,
    /// Reason why the server is gone. `None` if the server is not gone.
    gone: Option<String>,
    /// True if the server closed the connection.
    left: bool,
}

impl Connection {
    /// Starts a connection on `socket` for device `id` with `queues` queues and this budget.
    pub(super) fn new(
        id: &str,
        socket: UnixStream,
        queues: usize,
        times: Times,
        budget: Arc<Mutex<Budget>>,
    ) -> Result<Self, ServerError> {
        let host = |source| ServerError::Host { what: "set up the connection to the vhost-user server", source };
        let (watched, own) = (socket.try_clone().map_err(host)?, socket.try_clone().map_err(host)?);
        let limit = TimeLimit::new(format!("{id}_limit"), watched).map_err(host)?;
        let frontend = Frontend::from_stream(socket, queues as u64);
        Ok(Self { frontend, socket: own, limit, times, peer: Peer::new_server(), budget, gone: None, left: false })
    }

    /// Sends a request and waits for the answer. The wait ends after `time`, or earlier if the current operation or the budget has less
    /// time left.
    fn call<R>(
        &mut self,
        request: &'static str,
        time: Duration,
        call: impl FnOnce(&mut Frontend) -> vhost::Result<R>,
    ) -> Result<R, ServerError> {
        if let Some(reason) = &self.gone {
            return Err(ServerError::Gone(reason.clone()));
        }
        let Self { frontend, limit, peer, budget, .. } = self;
        let start = Instant::now();
        let left = time.saturating_sub(Operation::waited(*peer)).min(lock(budget).allows(start));
        let result = limit.during(left, || call(frontend));
        let end = Instant::now();
        Operation::note(*peer, end.duration_since(start));
        lock(budget).pay(start, end);
        let error = match result {
            Ok(result) => return Ok(result),
            Err(error) => error,
        };
        let reason = match error {
            VhostError::VhostUserProtocol(WireError::BackendInternalError) => {
                return Err(ServerError::Refused(request));
            }
            _ if self.limit.is_over() => format!("did not complete {request} in time (limit: {} ms)", time.as_millis()),
            VhostError::VhostUserProtocol(
                WireError::Disconnected | WireError::PartialMessage | WireError::SocketBroken(_),
            ) => {
                self.left = true;
                format!("closed the connection during {request}")
            }
            error => format!("sent an invalid answer to {request}: {error}"),
        };
        Err(self.give_up(reason))
    }

    fn short<R>(
        &mut self,
        request: &'static str,
        call: impl FnOnce(&mut Frontend) -> vhost::Result<R>,
    ) -> Result<R, ServerError> {
        self.call(request, self.times.other, call)
    }

    /// Closes the connection to a server that broke a rule, and returns the error.
    pub(super) fn give_up(&mut self, reason: String) -> ServerError {
        self.limit.close();
        ServerError::Gone(self.gone.get_or_insert(reason).clone())
    }

    /// Returns the reason why the server is gone, or `None` if the server is not gone.
    pub(super) fn gone(&self) -> Option<&str> {
        self.gone.as_deref()
    }

    /// True if the server is gone because the server closed the connection.
    pub(super) fn has_left(&self) -> bool {
        self.left
    }

    /// Returns the time limit of an operation. The draining of queues has its own limit.
    pub(super) fn time(&self) -> Duration {
        self.times.other
    }

    /// Claims the server (`SET_OWNER`), and returns its virtio features.
    pub(super) fn take(&mut self) -> Result<u64, ServerError> {
        self.short("SET_OWNER", |server| server.set_owner())?;
        self.short("GET_FEATURES", |server| server.get_features())
    }

    /// Negotiates the protocol features of `wanted` that the server supports. Returns the negotiated features.
    pub(super) fn agree(
        &mut self,
        wanted: VhostUserProtocolFeatures,
    ) -> Result<VhostUserProtocolFeatures, ServerError> {
        let has = self.short("GET_PROTOCOL_FEATURES", VhostUserFrontend::get_protocol_features)?;
        let agreed = has & wanted;
        self.short("SET_PROTOCOL_FEATURES", |server| server.set_protocol_features(agreed))?;
        if agreed.contains(VhostUserProtocolFeatures::REPLY_ACK) {
            // From here on, the server acknowledges each request, so the front end detects refused requests.
            self.frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        }
        Ok(agreed)
    }

    /// Returns the number of queues that the server supports.
    pub(super) fn queue_count(&mut self) -> Result<u64, ServerError> {
        self.short("GET_QUEUE_NUM", VhostUserFrontend::get_queue_num)
    }

    /// Returns the maximum number of memory regions that the server supports.
    pub(super) fn most_regions(&mut self) -> Result<u64, ServerError> {
        self.short("GET_MAX_MEM_SLOTS", VhostUserFrontend::get_max_mem_slots)
    }

    /// Returns the first `len` bytes of the device configuration.
    pub(super) fn config(&mut self, len: usize) -> Result<Vec<u8>, ServerError> {
        let size = u32::try_from(len).map_err(|_| ServerError::Refused("GET_CONFIG"))?;
        let zeroes = vec![0; len];
        let (_, config) =
            self.short("GET_CONFIG", |server| server.get_config(0, size, VhostUserConfigFlags::empty(), &zeroes))?;
        Ok(config)
    }

    /// Writes a field of the device configuration.
    pub(super) fn set_config(&mut self, offset: u32, value: &[u8]) -> Result<(), ServerError> {
        self.short("SET_CONFIG", |server| server.set_config(offset, VhostUserConfigFlags::empty(), value))
    }

    /// Sends the server the other end of the back channel. The server sends its requests on this channel.
    pub(super) fn set_back_channel(&mut self, end: &impl AsRawFd) -> Result<(), ServerError> {
        self.short("SET_BACKEND_REQ_FD", |server| server.set_backend_request_fd(end))
    }

    /// Sends the features that the driver has accepted.
    pub(super) fn set_features(&mut self, features: u64) -> Result<(), ServerError> {
        self.short("SET_FEATURES", |server| server.set_features(features))
    }

    /// Asks the server to reset the device.
    pub(super) fn reset_device(&mut self) -> Result<(), ServerError> {
        self.short("RESET_DEVICE", VhostUserFrontend::reset_device)
    }

    /// Replaces the server's memory table with these regions of RAM.
    pub(super) fn set_memory(&mut self, regions: &[&RamRegion]) -> Result<(), ServerError> {
        let regions = regions.iter().map(|region| describe(region)).collect::<Result<Vec<_>, _>>()?;
        self.short("SET_MEM_TABLE", |server| server.set_mem_table(&regions).map(drop))
    }

    /// Adds a region of RAM to the server's memory table.
    pub(super) fn add_memory(&mut self, region: &RamRegion) -> Result<(), ServerError> {
        let region = describe(region)?;
        self.short("ADD_MEM_REG", |server| server.add_mem_region(&region).map(drop))
    }

    /// Removes a region of RAM from the server's memory table.
    pub(super) fn remove_memory(&mut self, region: &RamRegion) -> Result<(), ServerError> {
        let region = describe(region)?;
        self.short("REM_MEM_REG", |server| server.remove_mem_region(&region))
    }

    /// Adds part of a file to the server's memory table.
    pub(super) fn add_region(&mut self, region: &FileRegion) -> Result<(), ServerError> {
        self.short("ADD_MEM_REG", |server| server.add_mem_region(&describe_file(region)).map(drop))
    }

    /// Removes part of a file from the server's memory table.
    pub(super) fn remove_region(&mut self, region: &FileRegion) -> Result<(), ServerError> {
        self.short("REM_MEM_REG", |server| server.remove_mem_region(&describe_file(region)))
    }

    /// Sends a translation to the server. This function never waits. If the socket is full because the server does not read, the connection
    /// is closed.
    pub(super) fn update(&mut self, mapping: Iotlb) -> Result<(), ServerError> {
        if let Some(reason) = &self.gone {
            return Err(ServerError::Gone(reason.clone()));
        }
        let message = iotlb_message(mapping, 0);
        match send(&self.socket, &message, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(sent) if sent == message.len() => Ok(()),
            Ok(_) | Err(Errno::AGAIN) => Err(self.give_up("did not read the translations that it requested".into())),
            Err(_) => {
                self.left = true;
                Err(self.give_up("closed the connection during IOTLB_MSG".into()))
            }
        }
    }

    /// Asks the server to drop its translations of `len` bytes from `iova` on. Waits for the confirmation, for at most `time`.
    pub(super) fn invalidate(&mut self, iova: u64, len: u64, time: Duration) -> Result<(), ServerError> {
        let range = Iotlb { iova, size: len, user: 0, permissions: Permissions::empty(), kind: Kind::Invalidate };
        let message = iotlb_message(range, NEED_REPLY);
        let socket = self.socket.try_clone();
        let socket = socket.map_err(|source| ServerError::Host { what: "send to the vhost-user server", source })?;
        self.call("IOTLB_MSG (invalidate)", time, |_| ask(&socket, &message).map_err(VhostError::VhostUserProtocol))
    }

    /// Asks the server to create the file for its records of requests in flight.
    pub(super) fn new_inflight(&mut self, queues: u16, size: u16) -> Result<(VhostUserInflight, File), ServerError> {
        let wanted = VhostUserInflight { num_queues: queues, queue_size: size, ..Default::default() };
        self.short("GET_INFLIGHT_FD", |server| server.get_inflight_fd(&wanted))
    }

    /// Sends the server the file for requests in flight. This server or a previous server created the file.
    pub(super) fn set_inflight(&mut self, inflight: &VhostUserInflight, file: &File) -> Result<(), ServerError> {
        self.short("SET_INFLIGHT_FD", |server| server.set_inflight_fd(inflight, file.as_raw_fd()))
    }

    /// Sets up a queue. The server starts at element `next` of the queue's available ring.
    pub(super) fn set_queue(&mut self, index: u16, rings: &Rings, next: u16) -> Result<(), ServerError> {
        let place = usize::from(index);
        let addresses = VringConfigData {
            queue_max_size: rings.size,
            queue_size: rings.size,
            flags: 0,
            desc_table_addr: rings.descriptors,
            used_ring_addr: rings.used,
            avail_ring_addr: rings.available,
            log_addr: None,
        };
        self.short("SET_VRING_NUM", |server| server.set_vring_num(place, rings.size))?;
        self.short("SET_VRING_BASE", |server| server.set_vring_base(place, next))?;
        self.short("SET_VRING_ADDR", |server| server.set_vring_addr(place, &addresses))
    }

    /// Sends the server the eventfds of a queue. The server starts the queue when it receives the kick eventfd.
    pub(super) fn set_events(
        &mut self,
        index: u16,
        call: &EventFd,
        error: &EventFd,
        kick: &EventFd,
    ) -> Result<(), ServerError> {
        let place = usize::from(index);
        self.short("SET_VRING_CALL", |server| server.set_vring_call(place, call))?;
        self.short("SET_VRING_ERR", |server| server.set_vring_err(place, error))?;
        self.short("SET_VRING_KICK", |server| server.set_vring_kick(place, kick))
    }

    /// Enables or disables a queue. Call this function only if `VHOST_USER_F_PROTOCOL_FEATURES` was negotiated.
    pub(super) fn enable_queue(&mut self, index: u16, on: bool) -> Result<(), ServerError> {
        self.short("SET_VRING_ENABLE", |server| server.set_vring_enable(index.into(), on))
    }

    /// Stops a queue. Returns the index of the next element of the queue's available ring. Before the server answers, it completes all
    /// requests that it has taken from the queue.
    pub(super) fn stop_queue(&mut self, index: u16) -> Result<u16, ServerError> {
        let next = self.call("GET_VRING_BASE", self.times.drain, |server| server.get_vring_base(index.into()))?;
        u16::try_from(next)
            .map_err(|_| self.give_up(format!("answered GET_VRING_BASE with {next}, but the maximum is 65535")))
    }
}

/// Converts a region of RAM to an entry of the server's memory table. The user address is the guest-physical address, because the server
/// needs no address of this process.
fn describe(region: &RamRegion) -> Result<VhostUserMemoryRegionInfo, ServerError> {
    let what = "share guest RAM with the vhost-user server, because no file backs the RAM";
    let file = region.file_offset().ok_or(ServerError::Host { what, source: io::ErrorKind::Unsupported.into() })?;
    let gpa = region.start_addr().raw_value();
    Ok(VhostUserMemoryRegionInfo {
        guest_phys_addr: gpa,
        memory_size: region.len(),
        userspace_addr: gpa,
        mmap_offset: file.start(),
        mmap_handle: file.file().as_raw_fd(),
    })
}

/// Converts part of a file to an entry of the server's memory table.
fn describe_file(region: &FileRegion) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: region.address,
        memory_size: region.len,
        userspace_addr: region.address,
        mmap_offset: region.offset,
        mmap_handle: region.file.as_raw_fd(),
    }
}

/// Encodes a message about translations, with its header.
fn iotlb_message(message: Iotlb, flags: u32) -> [u8; HEADER + BYTES] {
    let mut bytes = [0; HEADER + BYTES];
    let size = u32::try_from(BYTES).unwrap_or(0);
    for (place, word) in bytes.chunks_mut(4).zip([IOTLB_MSG, VERSION | flags, size]) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    bytes[HEADER..].copy_from_slice(&message.to_bytes());
    bytes
}

/// Sends a message about translations, and waits for the reply.
fn ask(mut socket: &UnixStream, message: &[u8]) -> Result<(), WireError> {
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::UnexpectedEof => WireError::Disconnected,
        _ => WireError::SocketBroken(error),
    };
    socket.write_all(message).map_err(failed)?;
    let mut answer = [0; HEADER + 8];
    socket.read_exact(&mut answer).map_err(failed)?;
    let header = [IOTLB_MSG, VERSION | REPLY, 8].map(u32::to_le_bytes);
    if answer[..HEADER] != *header.as_flattened() {
        return Err(WireError::InvalidMessage);
    }
    if answer[HEADER..] == [0; 8] { Ok(()) } else { Err(WireError::BackendInternalError) }
}

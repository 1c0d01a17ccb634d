// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! All connections of a device: connections that the guest requested, and connections that host programs requested.
//!
//! An edge-triggered epoll watches the sockets and reports each change once. The connection remembers the change until a read or write of
//! its socket would block. Therefore neither side can make the thread loop without progress. Connections with packets for the guest wait in
//! `turns`. Each connection is in `turns` at most once, and sends one packet per turn.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use log::warn;
use rustix::event::{Timespec, epoll};

use super::connection::{Connection, Fate};
use super::counters::Counts;
use super::packet::Header;
use super::spec::{HOST_CID, PORT_ANY, TYPE_STREAM, op};
use super::unix::{Greeting, Listener, greeting};
use crate::counters::count;
use crate::throttle::Throttle;

/// Maximum number of connections, even if the process may open more file descriptors.
pub const MOST_CONNECTIONS: usize = 1024;
/// Maximum number of clients that have not sent their first line. When more clients connect, the hub closes the oldest clients.
pub const MOST_CLIENTS: usize = 128;
/// Maximum number of resets that wait for buffers of the guest. The number equals the queue size. At this limit, the device accepts no
/// further packets and clients.
const MOST_RESETS: usize = 256;
/// Maximum number of clients that are accepted at a time.
const ACCEPTS: usize = 32;
/// Maximum number of socket events that are read at a time.
const EVENTS: usize = 64;
/// First host port for clients. Lower ports are for host programs that the guest connects to.
const FIRST_PORT: u32 = 1 << 30;

/// Key of a connection: the host's port and the guest's port. Sockets without a connection have [`PORT_ANY`] as the guest's port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    host: u32,
    guest: u32,
}

impl Key {
    const LISTENER: Self = Self { host: PORT_ANY, guest: PORT_ANY };

    fn client(number: u32) -> Self {
        Self { host: number, guest: PORT_ANY }
    }

    fn data(self) -> epoll::EventData {
        epoll::EventData::new_u64(u64::from(self.host) << 32 | u64::from(self.guest))
    }

    fn of(data: epoll::EventData) -> Self {
        let half = |number: u64| u32::try_from(number & u64::from(u32::MAX)).unwrap_or(PORT_ANY);
        Self { host: half(data.u64() >> 32), guest: half(data.u64()) }
    }
}

/// Returns the watched events of a socket.
fn watched() -> epoll::EventFlags {
    epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::RDHUP | epoll::EventFlags::ET
}

/// State of a device that does not change when the driver resets the device.
pub(super) struct Ends {
    /// CID of the guest.
    pub(super) cid: u64,
    /// Listener of the host's side.
    pub(super) listener: Listener,
    /// Maximum number of connections.
    pub(super) connections: usize,
    pub(super) counts: Counts,
}

/// Connections of a device while a driver uses it.
pub(super) struct Hub {
    ends: Arc<Ends>,
    epoll: OwnedFd,
    connections: HashMap<Key, Connection>,
    /// Host clients that have not sent their first line, from oldest to newest.
    clients: BTreeMap<u32, OwnedFd>,
    next_client: u32,
    next_port: u32,
    /// True if clients may be waiting at the listener.
    accepts: bool,
    /// Resets to send to the guest.
    resets: VecDeque<Header>,
    /// Connections that may have a packet for the guest.
    turns: VecDeque<Key>,
    throttle: Throttle,
}

impl Hub {
    /// # Errors
    /// The process has no free file descriptor.
    pub(super) fn new(ends: Arc<Ends>) -> io::Result<Self> {
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&poll, ends.listener.socket(), Key::LISTENER.data(), flags)?;
        Ok(Self {
            ends,
            epoll: poll,
            connections: HashMap::new(),
            clients: BTreeMap::new(),
            next_client: 0,
            next_port: FIRST_PORT,
            accepts: true,
            resets: VecDeque::new(),
            turns: VecDeque::new(),
            throttle: Throttle::default(),
        })
    }

    /// Chooses a random first port for host clients, so that a restored guest does not see the port of an old connection again. The guest
    /// may keep the state of an old connection for some seconds after the reset event. In this time, the guest would treat a request from
    /// the same port as a packet of the old connection.
    pub(super) fn forget_ports(&mut self) {
        let chance = u32::try_from(RandomState::new().hash_one(0) >> 34).unwrap_or_default();
        self.next_port = FIRST_PORT + chance;
    }

    /// Returns the file descriptor that becomes readable when a socket has changed.
    pub(super) fn source(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    /// Returns true if the maximum number of resets is waiting for buffers of the guest. The device must then accept no more packets and
    /// clients.
    pub(super) fn is_full(&self) -> bool {
        self.resets.len() >= MOST_RESETS
    }

    /// Returns true if the hub may have a packet for the guest.
    pub(super) fn has_output(&self) -> bool {
        !self.resets.is_empty() || !self.turns.is_empty()
    }

    /// Handles changes of sockets. Returns true if a socket has changed.
    pub(super) fn notice(&mut self) -> bool {
        let mut room = [MaybeUninit::uninit(); EVENTS];
        // With a valid epoll descriptor, the call fails only if a signal interrupts the call.
        let Ok((events, _)) = epoll::wait(&self.epoll, &mut room, Some(&Timespec::default())) else { return false };
        let mut some = false;
        for event in events {
            some = true;
            // References to fields of a packed structure are not allowed, so copy the fields of the event.
            let (changed, data) = (event.flags, event.data);
            let is = |flags| changed.intersects(flags);
            let hung_up = is(epoll::EventFlags::HUP | epoll::EventFlags::ERR);
            let readable = is(epoll::EventFlags::IN | epoll::EventFlags::RDHUP);
            match Key::of(data) {
                Key::LISTENER => self.accepts = true,
                Key { host, guest: PORT_ANY } => self.greet(host, hung_up || is(epoll::EventFlags::RDHUP)),
                key => {
                    if let Some(connection) = self.connections.get_mut(&key) {
                        let fate = connection.notice(readable, is(epoll::EventFlags::OUT), hung_up);
                        self.settle(key, fate);
                    }
                }
            }
        }
        some
    }

    /// Accepts waiting clients. Returns true if at least one client was accepted.
    pub(super) fn accept(&mut self) -> bool {
        let mut some = false;
        for _ in 0..ACCEPTS {
            if !self.accepts || self.is_full() {
                break;
            }
            match self.ends.listener.accept() {
                Ok(Some(client)) => {
                    some = true;
                    self.add_client(client);
                }
                Ok(None) => self.accepts = false,
                // `accepts` stays true, so the next call of this function tries again.
                Err(error) => {
                    if self.throttle.pass() {
                        warn!(
                            "virtio-vsock: cannot accept a client: {error}; if too many files are open, raise the limit (ulimit -n)"
                        );
                    }
                    break;
                }
            }
        }
        some
    }

    fn add_client(&mut self, client: OwnedFd) {
        if self.clients.len() >= MOST_CLIENTS {
            self.clients.pop_first();
        }
        let number = self.next_client;
        // No client gets the number `PORT_ANY`, because the listener's key uses this number.
        self.next_client = (number + 1) % PORT_ANY;
        match epoll::add(&self.epoll, &client, Key::client(number).data(), watched()) {
            Ok(()) => drop(self.clients.insert(number, client)),
            Err(error) => {
                if self.throttle.pass() {
                    warn!("virtio-vsock: cannot watch a client, so the connection is closed: {error}");
                }
            }
        }
    }

    /// Reads the first line of a client. `ended` is true if the client sends no more data.
    fn greet(&mut self, number: u32, ended: bool) {
        let Some(client) = self.clients.get(&number) else { return };
        let port = match greeting(client, ended) {
            Greeting::None => return,
            Greeting::Connect(port) => Some(port),
            Greeting::Wrong => None,
        };
        let Some(client) = self.clients.remove(&number) else { return };
        let Some(port) = port.filter(|_| self.connections.len() < self.ends.connections) else {
            return count(&self.ends.counts.refused, 1);
        };
        let key = self.free_key(port);
        if epoll::modify(&self.epoll, &client, key.data(), watched()).is_ok() {
            self.connections.insert(key, Connection::of_host(client));
            self.settle(key, Fate::Goes);
        }
    }

    /// Returns a key with a host port that no connection to this guest port uses.
    fn free_key(&mut self, guest: u32) -> Key {
        loop {
            let key = Key { host: self.next_port, guest };
            self.next_port = (self.next_port + 1) % PORT_ANY;
            self.next_port = self.next_port.max(FIRST_PORT);
            if !self.connections.contains_key(&key) {
                return key;
            }
        }
    }

    /// Handles a packet of the guest. `data` is the packet's data, or empty if the packet has more bytes than a connection accepts.
    pub(super) fn receive(&mut self, header: &Header, data: &[u8]) {
        count(&self.ends.counts.tx_packets, 1);
        let Header { src_cid, dst_cid, src_port, dst_port, kind, op, .. } = *header;
        if src_cid != self.ends.cid || src_port == PORT_ANY {
            // The source address is invalid, so the device cannot answer the packet.
            return;
        }
        if kind != TYPE_STREAM || dst_cid != HOST_CID {
            return self.refuse(header);
        }
        let key = Key { host: dst_port, guest: src_port };
        match self.connections.get_mut(&key) {
            Some(connection) => {
                let fate = connection.receive(header, data, dst_port);
                match (fate, op) {
                    (Fate::Goes, op::RW) => count(&self.ends.counts.tx_bytes, header.len.into()),
                    (Fate::Goes, op::RESPONSE) => count(&self.ends.counts.connections, 1),
                    _ => {}
                }
                self.settle(key, fate);
            }
            None if op == op::REQUEST => self.connect(key, header),
            None => self.refuse(header),
        }
    }

    /// Connects the guest to the host program that serves the requested port, or refuses the connection.
    fn connect(&mut self, key: Key, header: &Header) {
        let full = self.connections.len() >= self.ends.connections;
        let socket = if full { None } else { self.ends.listener.connect(key.host).ok() };
        let watched = socket.filter(|socket| epoll::add(&self.epoll, socket, key.data(), watched()).is_ok());
        let Some(socket) = watched else {
            count(&self.ends.counts.refused, 1);
            return self.refuse(header);
        };
        count(&self.ends.counts.connections, 1);
        self.connections.insert(key, Connection::of_guest(socket, header));
        self.settle(key, Fate::Goes);
    }

    /// Answers a packet with a reset, unless the packet is a reset.
    fn refuse(&mut self, header: &Header) {
        if header.op != op::RST {
            let Header { src_port, dst_port, dst_cid, kind, .. } = *header;
            self.resets.push_back(Header {
                src_cid: dst_cid,
                dst_cid: self.ends.cid,
                src_port: dst_port,
                dst_port: src_port,
                kind,
                op: op::RST,
                ..Header::default()
            });
        }
    }

    /// Applies `fate` to a connection.
    fn settle(&mut self, key: Key, fate: Fate) {
        let Some(connection) = self.connections.get_mut(&key) else { return };
        if fate == Fate::Goes {
            if !connection.queued && connection.has_output() {
                connection.queued = true;
                self.turns.push_back(key);
            }
            return;
        }
        if connection.queued {
            self.turns.retain(|other| *other != key);
        }
        self.connections.remove(&key);
        if fate == Fate::Broken {
            count(&self.ends.counts.resets, 1);
        }
        if fate != Fate::Ends {
            self.resets.push_back(Header { op: op::RST, ..self.addressed(key) });
        }
    }

    fn addressed(&self, key: Key) -> Header {
        Header {
            src_cid: HOST_CID,
            dst_cid: self.ends.cid,
            src_port: key.host,
            dst_port: key.guest,
            kind: TYPE_STREAM,
            ..Header::default()
        }
    }

    /// Returns the next packet for the guest, or `None` if no packet is ready. `room` is the size of the guest's buffer after the header,
    /// at least one byte. The function writes the packet's data to the start of `scratch`.
    pub(super) fn next(&mut self, room: usize, scratch: &mut [u8]) -> Option<Header> {
        let packet = self.resets.pop_front().or_else(|| self.next_of_turns(room, scratch))?;
        count(&self.ends.counts.rx_packets, 1);
        count(&self.ends.counts.rx_bytes, packet.len.into());
        Some(packet)
    }

    fn next_of_turns(&mut self, room: usize, scratch: &mut [u8]) -> Option<Header> {
        while let Some(key) = self.turns.pop_front() {
            let Some(connection) = self.connections.get_mut(&key) else { continue };
            let packet = connection.next(room, scratch);
            connection.queued = connection.has_output();
            if connection.queued {
                self.turns.push_back(key);
            }
            if let Some(packet) = packet {
                let Header { len, op, flags, buf_alloc, fwd_cnt, .. } = packet;
                return Some(Header { len, op, flags, buf_alloc, fwd_cnt, ..self.addressed(key) });
            }
        }
        None
    }

    /// Closes all sockets except the listener.
    pub(super) fn close(&mut self) {
        self.connections.clear();
        self.clients.clear();
        self.turns.clear();
        self.resets.clear();
    }

    /// Returns true if all collections are within their limits.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn is_bounded(&self) -> bool {
        self.connections.len() <= self.ends.connections
            && self.clients.len() <= MOST_CLIENTS
            && self.turns.len() <= self.connections.len()
            && self.resets.len() <= MOST_RESETS + MOST_CONNECTIONS
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Connection between a socket of the guest and a socket of the host.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send};

use super::credit::{BUF_ALLOC, Credit};
use super::packet::Header;
use super::spec::{op, shutdown};

/// Maximum number of data bytes in a packet for the guest.
pub(super) const MOST_DATA: usize = 64 << 10;

/// Stage of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// A host client wants to connect. The device has not sent the request to the guest yet.
    ToRequest,
    /// The device has sent the request to the guest.
    Asked,
    /// The guest has requested the connection. The device has not sent the response yet.
    ToAnswer,
    /// The connection is established.
    Open,
}

/// Action for the caller after an event of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// Keep the connection.
    Goes,
    /// Remove the connection. The guest knows that the connection has ended.
    Ends,
    /// Remove the connection, and send the guest a reset.
    Reset,
    /// The guest broke a rule: remove the connection, and send the guest a reset.
    Broken,
}

/// Connection. No method blocks.
pub(super) struct Connection {
    stage: Stage,
    /// Socket on the host. `None` after the device has closed the socket, because no more data can pass through it.
    socket: Option<OwnedFd>,
    credit: Credit,
    /// Bytes from the guest that the socket has not accepted yet, at most [`BUF_ALLOC`].
    kept: VecDeque<u8>,
    /// True if the socket may have unread data or an unread end of stream.
    readable: bool,
    /// True if the socket may accept data.
    writable: bool,
    /// True if both directions of the socket are closed (`EPOLLHUP`), or if the socket has failed.
    hung_up: bool,
    /// True if the host's side has ended its stream, and the device has sent all data of the stream to the guest.
    ended: bool,
    /// True if the host's side accepts no more data.
    deaf: bool,
    /// Directions that the guest has shut down.
    guest_shut: u32,
    /// Directions that the device has shut down on the socket.
    socket_shut: u32,
    /// Directions that the device has announced to the guest as shut down.
    sent_shut: u32,
    /// True if the guest has requested a credit update.
    update_due: bool,
    /// True if the device has requested a credit update because the guest's buffer is full. False as soon as the guest reports free space.
    requested_room: bool,
    /// True if the connection is in the hub's list of connections that wait to send a packet to the guest.
    pub(super) queued: bool,
}

impl Connection {
    fn new(stage: Stage, socket: OwnedFd) -> Self {
        Self {
            stage,
            socket: Some(socket),
            credit: Credit::default(),
            kept: VecDeque::new(),
            readable: true,
            writable: true,
            hung_up: false,
            ended: false,
            deaf: false,
            guest_shut: 0,
            socket_shut: 0,
            sent_shut: 0,
            update_due: false,
            requested_room: false,
            queued: false,
        }
    }

    /// Creates a connection that a host client has requested.
    pub(super) fn of_host(socket: OwnedFd) -> Self {
        Self::new(Stage::ToRequest, socket)
    }

    /// Creates a connection that the guest has requested with the packet `request`.
    pub(super) fn of_guest(socket: OwnedFd, request: &Header) -> Self {
        let mut connection = Self::new(Stage::ToAnswer, socket);
        connection.credit.hear(request);
        connection
    }

    /// Handles a change of the socket's state.
    pub(super) fn notice(&mut self, readable: bool, writable: bool, hung_up: bool) -> Fate {
        self.readable |= readable | hung_up;
        self.writable |= writable | hung_up;
        self.hung_up |= hung_up;
        match self.stage {
            Stage::ToRequest if hung_up => Fate::Ends,
            // The host client has closed its socket while it waited for the guest's answer.
            Stage::Asked if hung_up => Fate::Reset,
            _ => {
                self.send_kept();
                self.follow()
            }
        }
    }

    /// Handles a packet of the guest. `data` is the packet's data, or empty if the packet has more than [`BUF_ALLOC`] bytes. When the guest
    /// accepts a host client's connection, the device sends `host_port` to the client in the line `OK <port>`.
    pub(super) fn receive(&mut self, header: &Header, data: &[u8], host_port: u32) -> Fate {
        self.credit.hear(header);
        self.requested_room &= self.credit.left() == 0;
        match (header.op, self.stage) {
            (op::RST, _) => Fate::Ends,
            (op::RESPONSE, Stage::Asked) => self.open(host_port),
            (_, Stage::ToRequest | Stage::Asked) | (op::REQUEST | op::RESPONSE, _) => Fate::Broken,
            (op::RW, _) => self.take(header.len, data),
            (op::SHUTDOWN, _) => {
                self.guest_shut |= header.flags & shutdown::BOTH;
                self.follow()
            }
            (op::CREDIT_UPDATE, _) => Fate::Goes,
            (op::CREDIT_REQUEST, _) => {
                self.update_due = true;
                Fate::Goes
            }
            _ => Fate::Broken,
        }
    }

    /// Establishes a connection that the guest has accepted.
    fn open(&mut self, host_port: u32) -> Fate {
        self.stage = Stage::Open;
        let line = format!("OK {host_port}\n");
        // This line is the first data on the socket. So the socket has room for the line, unless the client has closed the connection.
        if self.send(line.as_bytes()) == line.len() { Fate::Goes } else { Fate::Reset }
    }

    /// Handles data from the guest.
    fn take(&mut self, len: u32, data: &[u8]) -> Fate {
        if self.guest_shut & shutdown::SEND != 0 || len as usize > BUF_ALLOC - self.kept.len() {
            return Fate::Broken;
        }
        self.credit.count_received(len);
        let sent = if self.kept.is_empty() { self.send(data) } else { 0 };
        if self.deaf {
            self.credit.count_forwarded(data.len());
        } else {
            self.credit.count_forwarded(sent);
            self.kept.extend(&data[sent..]);
        }
        Fate::Goes
    }

    /// Sends data to the socket. Returns the number of bytes that the socket accepted.
    fn send(&mut self, mut data: &[u8]) -> usize {
        let all = data.len();
        while !data.is_empty()
            && self.writable
            && let Some(socket) = &self.socket
        {
            match send(socket, data, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(sent) => data = &data[sent..],
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => self.writable = false,
                Err(_) => {
                    self.deaf = true;
                    break;
                }
            }
        }
        all - data.len()
    }

    /// Sends the kept bytes to the socket.
    fn send_kept(&mut self) {
        let mut kept = std::mem::take(&mut self.kept);
        while !kept.is_empty() {
            let sent = self.send(kept.as_slices().0);
            kept.drain(..sent);
            self.credit.count_forwarded(sent);
            if self.deaf {
                self.credit.count_forwarded(kept.len());
                return;
            }
            if !self.writable {
                break;
            }
        }
        // If all bytes were sent, drop `kept` to free its memory.
        if !kept.is_empty() {
            self.kept = kept;
        }
    }

    /// Shuts down the socket in the directions that the guest has shut down. Data that the device still keeps for the socket is sent first.
    fn follow(&mut self) -> Fate {
        let drained = self.kept.is_empty();
        if self.guest_shut == shutdown::BOTH && drained {
            return Fate::Reset;
        }
        let mut shut = |flag, how| {
            if self.guest_shut & flag != 0
                && self.socket_shut & flag == 0
                && let Some(socket) = &self.socket
            {
                self.socket_shut |= flag;
                // The system call fails if the other side has closed its socket. A later event of this socket reports the closure.
                let _ = rustix::net::shutdown(socket.as_fd(), how);
            }
        };
        shut(shutdown::RECEIVE, Shutdown::Read);
        if drained {
            shut(shutdown::SEND, Shutdown::Write);
        }
        Fate::Goes
    }

    /// Returns the directions in which the device must announce a shutdown to the guest, because the host's side sends or accepts no more
    /// data.
    fn to_shut(&self) -> u32 {
        // If the guest receives no more data, the device need not read the remaining data of the socket.
        let ended = self.ended || self.hung_up && self.guest_shut & shutdown::RECEIVE != 0;
        let through = self.guest_shut & shutdown::SEND != 0 && self.kept.is_empty();
        let send = if ended { shutdown::SEND } else { 0 };
        let receive = if self.deaf || ended && (self.hung_up || through) { shutdown::RECEIVE } else { 0 };
        send | receive
    }

    fn reads(&self) -> bool {
        self.stage == Stage::Open
            && self.readable
            && !self.ended
            && self.socket.is_some()
            && self.guest_shut & shutdown::RECEIVE == 0
    }

    /// Returns true if the connection may have a packet for the guest.
    pub(super) fn has_output(&self) -> bool {
        match self.stage {
            Stage::ToRequest | Stage::ToAnswer => true,
            Stage::Asked => false,
            Stage::Open => {
                self.update_due
                    || self.credit.needs_announcement()
                    || self.to_shut() & !self.sent_shut != 0
                    || self.reads() && (self.credit.left() != 0 || !self.requested_room)
            }
        }
    }

    /// Returns the next packet for the guest, or `None` if no packet is ready. `room` is the size of the guest's buffer after the header,
    /// at least one byte. The function writes the packet's data to the start of `scratch`, which has [`MOST_DATA`] bytes. The caller sets
    /// CIDs and ports.
    pub(super) fn next(&mut self, room: usize, scratch: &mut [u8]) -> Option<Header> {
        let mut header = self.choose(room, scratch)?;
        self.credit.announce(&mut header);
        self.update_due = false;
        Some(header)
    }

    fn choose(&mut self, room: usize, scratch: &mut [u8]) -> Option<Header> {
        let of = |op| Some(Header { op, ..Header::default() });
        match self.stage {
            Stage::ToRequest => {
                self.stage = Stage::Asked;
                return of(op::REQUEST);
            }
            Stage::ToAnswer => {
                self.stage = Stage::Open;
                return of(op::RESPONSE);
            }
            Stage::Asked => return None,
            Stage::Open => {}
        }
        if self.reads() {
            let credit = self.credit.left();
            if credit != 0 {
                let len = self.read(room.min(credit), scratch);
                if len != 0 {
                    self.credit.count_sent(len);
                    return Some(Header { op: op::RW, len, ..Header::default() });
                }
            } else if !self.requested_room {
                self.requested_room = true;
                return of(op::CREDIT_REQUEST);
            }
        }
        let shut = self.to_shut();
        if shut & !self.sent_shut != 0 {
            self.sent_shut = shut;
            if shut == shutdown::BOTH {
                // From here on, the connection only waits for the guest's answer to the shutdown.
                self.socket = None;
                self.credit.count_forwarded(self.kept.len());
                self.kept = VecDeque::new();
                self.deaf = true;
            }
            return Some(Header { op: op::SHUTDOWN, flags: shut, ..Header::default() });
        }
        let update = self.update_due || self.credit.needs_announcement();
        if update { of(op::CREDIT_UPDATE) } else { None }
    }

    /// Reads at most `most` bytes from the socket. Returns 0 if the socket has no data now, or if the host's side has ended its stream.
    fn read(&mut self, most: usize, scratch: &mut [u8]) -> u32 {
        let most = most.min(scratch.len());
        while let Some(socket) = &self.socket {
            match recv(socket, &mut scratch[..most], RecvFlags::DONTWAIT) {
                Ok((_, 0)) => self.ended = true,
                Ok((_, read)) => return u32::try_from(read).unwrap_or(0),
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => self.readable = false,
                // The other side has closed its socket without reading all data.
                Err(_) => (self.ended, self.hung_up, self.deaf) = (true, true, true),
            }
            break;
        }
        0
    }
}

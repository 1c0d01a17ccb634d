// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A connection between a socket of the guest and one of the host.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown, recv, send};

use super::credit::{BUF_ALLOC, Credit};
use super::packet::Header;
use super::spec::{op, shutdown};

/// Most bytes of a packet for the guest.
pub(super) const MOST_DATA: usize = 64 << 10;

/// How far a connection has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The guest is to be asked.
    ToAsk,
    /// It was asked.
    Asked,
    /// It has asked, and is to be answered.
    ToAnswer,
    /// Bytes go.
    Open,
}

/// What becomes of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It goes on.
    Goes,
    /// It ends, and the guest knows.
    Ends,
    /// It ends, and the guest is told so.
    Reset,
    /// The same, for a rule that the guest broke.
    Broken,
}

/// A connection. None of its calls waits.
pub(super) struct Connection {
    stage: Stage,
    /// The host's socket, until nothing can go through it any more.
    socket: Option<OwnedFd>,
    credit: Credit,
    /// Bytes of the guest that the socket did not take yet, [`BUF_ALLOC`] at most.
    kept: VecDeque<u8>,
    /// The socket may have bytes, or an end.
    readable: bool,
    /// The socket may take bytes.
    writable: bool,
    /// Neither side of the socket sends any more.
    hung_up: bool,
    /// The host's side sends no more, and all that it sent is on its way to the guest.
    ended: bool,
    /// The host's side takes no more.
    deaf: bool,
    /// The directions that the guest has given up, and those of which the socket knows.
    guest_shut: u32,
    socket_shut: u32,
    /// The directions that the guest was told of.
    told_shut: u32,
    /// The guest has asked how much it may send.
    update_due: bool,
    /// It was asked how much it takes, since there was room last.
    asked_room: bool,
    /// It waits for its turn to send the guest something.
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
            told_shut: 0,
            update_due: false,
            asked_room: false,
            queued: false,
        }
    }

    /// Of a client of the host.
    pub(super) fn of_host(socket: OwnedFd) -> Self {
        Self::new(Stage::ToAsk, socket)
    }

    /// Of the guest, which asked with this packet.
    pub(super) fn of_guest(socket: OwnedFd, request: &Header) -> Self {
        let mut connection = Self::new(Stage::ToAnswer, socket);
        connection.credit.hear(request);
        connection
    }

    /// Something has come about at the socket.
    pub(super) fn notice(&mut self, readable: bool, writable: bool, hung_up: bool) -> Fate {
        self.readable |= readable | hung_up;
        self.writable |= writable | hung_up;
        self.hung_up |= hung_up;
        match self.stage {
            Stage::ToAsk if hung_up => Fate::Ends,
            // A client does not wait any longer.
            Stage::Asked if hung_up => Fate::Reset,
            _ => {
                self.send_kept();
                self.follow()
            }
        }
    }

    /// A packet of the guest. `data` is what it has behind the header, or nothing where that is more than [`BUF_ALLOC`]. `host_port`
    /// is what a client of the host is told when the guest takes its connection.
    pub(super) fn receive(&mut self, header: &Header, data: &[u8], host_port: u32) -> Fate {
        self.credit.hear(header);
        self.asked_room &= self.credit.left() == 0;
        match (header.op, self.stage) {
            (op::RST, _) => Fate::Ends,
            (op::RESPONSE, Stage::Asked) => self.open(host_port),
            (_, Stage::ToAsk | Stage::Asked) | (op::REQUEST | op::RESPONSE, _) => Fate::Broken,
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

    /// The guest has taken the connection.
    fn open(&mut self, host_port: u32) -> Fate {
        self.stage = Stage::Open;
        let line = format!("OK {host_port}\n");
        // Nothing was sent before, so there is room unless the client is gone.
        if self.send(line.as_bytes()) == line.len() { Fate::Goes } else { Fate::Reset }
    }

    /// Bytes of the guest.
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

    /// Gives bytes to the socket; returns how many it took.
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

    /// Gives the socket what was kept.
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
        // Memory is not held for a connection that needs none.
        if !kept.is_empty() {
            self.kept = kept;
        }
    }

    /// Has the socket follow what the guest has shut down.
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
                // It fails where the other side is gone, which is noticed anyway.
                let _ = rustix::net::shutdown(socket.as_fd(), how);
            }
        };
        shut(shutdown::RECEIVE, Shutdown::Read);
        if drained {
            shut(shutdown::SEND, Shutdown::Write);
        }
        Fate::Goes
    }

    /// The directions in which nothing goes any more, for the host's side.
    fn to_shut(&self) -> u32 {
        // Where the guest takes nothing, there is nothing to be read to the end.
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

    /// Whether there is something for the guest, or may be.
    pub(super) fn has_output(&self) -> bool {
        match self.stage {
            Stage::ToAsk | Stage::ToAnswer => true,
            Stage::Asked => false,
            Stage::Open => {
                self.update_due
                    || self.credit.is_worth_telling()
                    || self.to_shut() & !self.told_shut != 0
                    || self.reads() && (self.credit.left() != 0 || !self.asked_room)
            }
        }
    }

    /// The next packet for the guest; `None` if there is none now. `room` is what its buffer has behind the header, a byte at least;
    /// bytes go to the start of `scratch`, which has [`MOST_DATA`]. CIDs and ports are the caller's matter.
    pub(super) fn next(&mut self, room: usize, scratch: &mut [u8]) -> Option<Header> {
        let mut header = self.choose(room, scratch)?;
        self.credit.tell(&mut header);
        self.update_due = false;
        Some(header)
    }

    fn choose(&mut self, room: usize, scratch: &mut [u8]) -> Option<Header> {
        let of = |op| Some(Header { op, ..Header::default() });
        match self.stage {
            Stage::ToAsk => {
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
            } else if !self.asked_room {
                self.asked_room = true;
                return of(op::CREDIT_REQUEST);
            }
        }
        let shut = self.to_shut();
        if shut & !self.told_shut != 0 {
            self.told_shut = shut;
            if shut == shutdown::BOTH {
                // What is left is the guest's answer.
                self.socket = None;
                self.credit.count_forwarded(self.kept.len());
                self.kept = VecDeque::new();
                self.deaf = true;
            }
            return Some(Header { op: op::SHUTDOWN, flags: shut, ..Header::default() });
        }
        let update = self.update_due || self.credit.is_worth_telling();
        if update { of(op::CREDIT_UPDATE) } else { None }
    }

    /// Reads of the socket; 0 if it has nothing now, or nothing any more.
    fn read(&mut self, most: usize, scratch: &mut [u8]) -> u32 {
        let most = most.min(scratch.len());
        while let Some(socket) = &self.socket {
            match recv(socket, &mut scratch[..most], RecvFlags::DONTWAIT) {
                Ok((_, 0)) => self.ended = true,
                Ok((_, read)) => return u32::try_from(read).unwrap_or(0),
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => self.readable = false,
                // The other side is gone, with bytes that it did not read.
                Err(_) => (self.ended, self.hung_up, self.deaf) = (true, true, true),
            }
            break;
        }
        0
    }
}

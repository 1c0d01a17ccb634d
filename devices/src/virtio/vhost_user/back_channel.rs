// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Channel for requests of the server to the front end. A request reports a changed device configuration, asks for a translation,
//! or reports a denied access.
//!
//! No function of this module blocks, even if the server sends only a part of a message or does not read replies.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use iommu_bounce::Permissions;
use rustix::net::{RecvFlags, SendFlags, recv, send};

use super::iotlb::{self, Iotlb, Kind};

/// Size of a header in bytes: request, flags and size.
const HEADER: usize = 12;
/// `VHOST_USER_BACKEND_IOTLB_MSG`.
const IOTLB_MSG: u32 = 1;
/// `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`.
const CONFIG_CHANGE: u32 = 2;
/// Flags of a request: version 1, and "reply wanted".
const VERSION: u32 = 1;
const NEED_REPLY: u32 = 1 << 3;
/// Flags of a reply: version 1, and "reply".
const REPLY: u32 = 1 << 2 | VERSION;

/// Front end's side of the channel.
pub(super) struct BackChannel {
    socket: UnixStream,
    message: [u8; HEADER + iotlb::BYTES],
    filled: usize,
    /// Number of the last request, if the server wants a reply and the front end has not sent the reply yet.
    unanswered: Option<u32>,
}

/// Received request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// No complete request has arrived.
    None,
    /// The device configuration has changed.
    ConfigChanged,
    /// The server needs the translation of this IOVA for this access.
    Miss(u64, Permissions),
    /// The server has already denied this access to this IOVA.
    Stopped(u64, Permissions),
    /// The channel has ended, or the server sent an unknown message.
    End,
}

impl BackChannel {
    /// Creates a channel. Returns this process's end and the server's end.
    pub(super) fn new() -> io::Result<(Self, UnixStream)> {
        let (socket, theirs) = UnixStream::pair()?;
        Ok((Self { socket, message: [0; HEADER + iotlb::BYTES], filled: 0, unanswered: None }, theirs))
    }

    /// Returns the socket, which becomes readable when a message arrives.
    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    fn word(&self, place: usize) -> u32 {
        let bytes = &self.message[4 * place..4 * place + 4];
        u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }

    /// Returns the number of bytes to read for the current message: first the size of a header, then the size of the whole message. Returns
    /// `None` if the message is unknown.
    fn len(&self) -> Option<usize> {
        if self.filled < HEADER {
            return Some(HEADER);
        }
        let payload = match (self.word(0), self.word(2)) {
            (CONFIG_CHANGE, 0) => 0,
            (IOTLB_MSG, size) if usize::try_from(size) == Ok(iotlb::BYTES) => iotlb::BYTES,
            _ => return None,
        };
        (self.word(1) & !NEED_REPLY == VERSION).then_some(HEADER + payload)
    }

    /// Takes the next request. The caller must then [answer](Self::answer) the request. If a request carries file descriptors, the host
    /// kernel closes these descriptors.
    pub(super) fn take(&mut self) -> Request {
        loop {
            let Some(len) = self.len() else { return Request::End };
            if self.filled == len {
                break;
            }
            match recv(&self.socket, &mut self.message[self.filled..len], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Request::End,
                Ok((count, _)) => self.filled += count,
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Request::None,
                Err(_) => return Request::End,
            }
        }
        self.filled = 0;
        self.unanswered = (self.word(1) & NEED_REPLY != 0).then_some(self.word(0));
        if self.word(0) == CONFIG_CHANGE {
            return Request::ConfigChanged;
        }
        let mut bytes = [0; iotlb::BYTES];
        bytes.copy_from_slice(&self.message[HEADER..]);
        match Iotlb::from_bytes(&bytes) {
            Some(Iotlb { iova, permissions, kind: Kind::Miss, .. }) => Request::Miss(iova, permissions),
            Some(Iotlb { iova, permissions, .. }) => Request::Stopped(iova, permissions),
            None => Request::End,
        }
    }

    /// Replies to the last request, if the server wants a reply. `done` is true if the request succeeded. Returns false if the reply cannot
    /// be sent, for example because the server does not read replies.
    pub(super) fn answer(&mut self, done: bool) -> bool {
        let Some(request) = self.unanswered.take() else { return true };
        let mut answer = [request, REPLY, 8].map(u32::to_le_bytes).concat();
        answer.extend(u64::from(!done).to_le_bytes());
        send(&self.socket, &answer, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) == Ok(answer.len())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    fn message(request: u32, flags: u32, size: u32) -> Vec<u8> {
        [request, flags, size].map(u32::to_le_bytes).concat()
    }

    #[test]
    fn config_change_is_taken_when_whole_and_answered_on_request() {
        let (mut channel, mut server) = BackChannel::new().unwrap();
        assert_eq!(channel.take(), Request::None);
        server.write_all(&message(2, 9, 0)[..5]).unwrap();
        assert_eq!(channel.take(), Request::None);
        server.write_all(&message(2, 9, 0)[5..]).unwrap();
        assert_eq!(channel.take(), Request::ConfigChanged);
        assert!(channel.answer(true));
        let mut answer = [0; 20];
        server.read_exact(&mut answer).unwrap();
        assert_eq!((&answer[..12], &answer[12..]), (&message(2, 5, 8)[..], [0; 8].as_slice()));
        server.write_all(&message(2, 1, 0)).unwrap();
        assert_eq!(channel.take(), Request::ConfigChanged);
        assert!(channel.answer(true), "no reply is wanted");
        drop(server);
        assert_eq!(channel.take(), Request::End);
    }

    /// Returns a message of the server about an access to an IOVA. `kind` is 1 for a miss and 4 for a denied access.
    fn access(iova: u64, permissions: u8, kind: u8) -> Vec<u8> {
        let rest = [permissions, kind, 0, 0, 0, 0, 0, 0];
        [&message(1, 9, 32), &iova.to_le_bytes()[..], &[0; 16], &rest].concat()
    }

    #[test]
    fn server_iotlb_messages_are_taken_whole_and_can_be_refused() {
        let (mut channel, mut server) = BackChannel::new().unwrap();
        let asked = access(0x1234, 1, 1);
        for part in asked.chunks(7) {
            assert_eq!(channel.take(), Request::None);
            server.write_all(part).unwrap();
        }
        server.write_all(&access(0x5678, 2, 4)).unwrap();
        assert_eq!(channel.take(), Request::Miss(0x1234, Permissions::READ));
        assert!(channel.answer(false));
        let mut answer = [0; 20];
        server.read_exact(&mut answer).unwrap();
        assert_eq!((&answer[..12], answer[12]), (&message(1, 5, 8)[..], 1));
        assert_eq!(channel.take(), Request::Stopped(0x5678, Permissions::WRITE));
        server.write_all(&access(0, 1, 2)).unwrap();
        assert_eq!(channel.take(), Request::End, "a server must not send translations");
    }

    #[test]
    fn reply_that_the_server_does_not_read_does_not_block() {
        let (mut channel, mut server) = BackChannel::new().unwrap();
        let mut taken = 0;
        while taken < 1_000_000 {
            server.write_all(&access(0x1000, 1, 1)).unwrap();
            assert_eq!(channel.take(), Request::Miss(0x1000, Permissions::READ));
            if !channel.answer(true) {
                return;
            }
            taken += 1;
        }
        panic!("all replies were sent");
    }

    #[test]
    fn unknown_message_ends_the_channel() {
        for (request, flags, size) in
            [(1, 1, 0), (1, 1, 33), (0, 1, 0), (3, 1, 0), (2, 1, 1), (2, 2, 0), (2, 5, 0), (u32::MAX, u32::MAX, 0)]
        {
            let (mut channel, mut server) = BackChannel::new().unwrap();
            server.write_all(&message(request, flags, size)).unwrap();
            assert_eq!(channel.take(), Request::End, "{request} {flags} {size}");
        }
    }
}

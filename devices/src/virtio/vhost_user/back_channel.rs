// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The channel for a server's own requests, of which one is known: that the device's configuration has changed. Nothing here waits,
//! whatever part of a message a server sends.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{RecvFlags, SendFlags, recv, send};

/// Bytes of a header: request, flags and size.
const HEADER: usize = 12;
/// `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`.
const CONFIG_CHANGE: u32 = 2;
/// Flags of a request: version 1, and whether an answer is wanted.
const VERSION: u32 = 1;
const NEED_REPLY: u32 = 1 << 3;
/// Flags of an answer: version 1.
const REPLY: u32 = 1 << 2 | VERSION;

/// This side's end.
pub(super) struct BackChannel {
    socket: UnixStream,
    header: [u8; HEADER],
    filled: usize,
}

/// What came.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// No whole request.
    None,
    /// The configuration has changed.
    ConfigChanged,
    /// The channel has ended, or what came is none that is known.
    End,
}

impl BackChannel {
    /// A channel, and the server's end of it.
    pub(super) fn new() -> io::Result<(Self, UnixStream)> {
        let (socket, theirs) = UnixStream::pair()?;
        Ok((Self { socket, header: [0; HEADER], filled: 0 }, theirs))
    }

    /// Becomes readable when something came.
    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Takes the next request. Descriptors that come with one are closed by the kernel.
    pub(super) fn take(&mut self) -> Request {
        match recv(&self.socket, &mut self.header[self.filled..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => return Request::End,
            Ok((count, _)) => self.filled += count,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return Request::None,
            Err(_) => return Request::End,
        }
        if self.filled < HEADER {
            return Request::None;
        }
        self.filled = 0;
        let word = |place: usize| {
            let bytes = &self.header[4 * place..4 * place + 4];
            u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
        };
        let (request, flags, size) = (word(0), word(1), word(2));
        if request != CONFIG_CHANGE || size != 0 || flags & !NEED_REPLY != VERSION {
            return Request::End;
        }
        if flags & NEED_REPLY != 0 && !self.answer() {
            return Request::End;
        }
        Request::ConfigChanged
    }

    /// Says that all is well; `false` if the server takes no answers.
    fn answer(&self) -> bool {
        let mut answer = [CONFIG_CHANGE, REPLY, 8].map(u32::to_le_bytes).concat();
        answer.extend(0u64.to_le_bytes());
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
    fn change_is_taken_once_it_is_whole_and_answered_if_an_answer_is_wanted() {
        let (mut channel, mut server) = BackChannel::new().unwrap();
        assert_eq!(channel.take(), Request::None);
        server.write_all(&message(2, 9, 0)[..5]).unwrap();
        assert_eq!(channel.take(), Request::None);
        server.write_all(&message(2, 9, 0)[5..]).unwrap();
        assert_eq!(channel.take(), Request::ConfigChanged);
        let mut answer = [0; 20];
        server.read_exact(&mut answer).unwrap();
        assert_eq!(answer[..12], message(2, 5, 8));
        server.write_all(&message(2, 1, 0)).unwrap();
        assert_eq!(channel.take(), Request::ConfigChanged);
        drop(server);
        assert_eq!(channel.take(), Request::End);
    }

    #[test]
    fn what_is_not_known_ends_the_channel() {
        for (request, flags, size) in [(1, 1, 0), (3, 1, 0), (2, 1, 1), (2, 2, 0), (2, 5, 0), (u32::MAX, u32::MAX, 0)] {
            let (mut channel, mut server) = BackChannel::new().unwrap();
            server.write_all(&message(request, flags, size)).unwrap();
            assert_eq!(channel.take(), Request::End, "{request} {flags} {size}");
        }
    }
}

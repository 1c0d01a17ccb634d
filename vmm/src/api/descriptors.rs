// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! File descriptors that a client sends together with bytes on a Unix socket (`SCM_RIGHTS`, see unix(7)).

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::task::{Context, Poll, ready};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};
use tokio::io::{Interest, ReadBuf};
use tokio::net::UnixStream;

/// Maximum number of descriptors with one request. Linux allows 253 descriptors in one message (`SCM_MAX_FD`).
pub(super) const MAX_DESCRIPTORS: usize = 64;

/// Reads bytes into `buf`, and the descriptors that were sent with the bytes into `descriptors`. The descriptors are close-on-exec. The
/// result is `false` if descriptors were lost: the client sent more than [`MAX_DESCRIPTORS`], or the process has reached its limit of
/// open files.
pub(super) fn poll_receive(
    stream: &UnixStream,
    context: &mut Context<'_>,
    buf: &mut ReadBuf<'_>,
    descriptors: &mut Vec<OwnedFd>,
) -> Poll<io::Result<bool>> {
    loop {
        ready!(stream.poll_read_ready(context))?;
        let received = stream.try_io(Interest::READABLE, || receive(stream, buf.initialize_unfilled(), descriptors));
        match received {
            Ok((count, whole)) => {
                buf.advance(count);
                return Poll::Ready(Ok(whole));
            }
            // The socket was empty. Poll again, so that the runtime wakes this task when bytes arrive.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Poll::Ready(Err(error)),
        }
    }
}

/// Returns the number of bytes read, and true if all descriptors were received.
fn receive(stream: &UnixStream, bytes: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> io::Result<(usize, bool)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(stream, &mut [IoSliceMut::new(bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(came) = message {
            descriptors.extend(came);
        }
    }
    Ok((received.bytes, !received.flags.contains(ReturnFlags::CTRUNC)))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{IoSlice, Read, Seek, Write};
    use std::os::fd::AsFd;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    use super::*;

    /// Sends `bytes` with `count` descriptors of a file that contains `text`.
    fn send(stream: &std::os::unix::net::UnixStream, bytes: &[u8], text: &str, count: usize) {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        let files = vec![file.as_fd(); count];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(200))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
        sendmsg(stream, &[IoSlice::new(bytes)], &mut control, SendFlags::empty()).unwrap();
    }

    fn receive_all(count: usize) -> (usize, Vec<OwnedFd>, bool) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
        runtime.block_on(async {
            let (client, server) = std::os::unix::net::UnixStream::pair().unwrap();
            server.set_nonblocking(true).unwrap();
            let server = UnixStream::from_std(server).unwrap();
            send(&client, b"request", "of the client", count);
            let (mut bytes, mut descriptors) = ([0; 64], Vec::new());
            let mut buf = ReadBuf::new(&mut bytes);
            let whole = std::future::poll_fn(|context| poll_receive(&server, context, &mut buf, &mut descriptors))
                .await
                .unwrap();
            (buf.filled().len(), descriptors, whole)
        })
    }

    #[test]
    fn descriptors_come_with_the_bytes() {
        let (len, descriptors, whole) = receive_all(2);
        assert_eq!((len, descriptors.len(), whole), (7, 2, true));
        let mut text = String::new();
        let mut file = File::from(descriptors.into_iter().next().unwrap());
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "of the client");
    }

    #[test]
    fn surplus_descriptors_are_reported_as_lost() {
        let (len, descriptors, whole) = receive_all(MAX_DESCRIPTORS + 16);
        assert_eq!((len, whole), (7, false));
        assert!(descriptors.len() < MAX_DESCRIPTORS + 16);
    }
}

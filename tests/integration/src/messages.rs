// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Messages with attached files over Unix sockets. The tests' device servers receive such messages.

use std::fs::File;
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use anyhow::{Context, Result};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

/// Serves clients of `socket`, one after the other, until this process is killed. If a session ends with an error, prints the
/// error to stderr, with `program` as its prefix.
///
/// # Errors
/// Fails if the socket or a session cannot be created.
pub fn serve<S>(
    program: &str,
    socket: &Path,
    new_session: impl Fn(UnixStream) -> Result<S>,
    serve: impl Fn(S) -> Result<()>,
) -> Result<()> {
    let listener = UnixListener::bind(socket).with_context(|| format!("cannot listen on {}", socket.display()))?;
    loop {
        let (client, _) = listener.accept().context("cannot accept a connection")?;
        if let Err(error) = serve(new_session(client)?) {
            eprintln!("{program}: {error:#}");
        }
    }
}

/// Received message, with the header in parsed form.
#[derive(Debug)]
pub struct Message<Head> {
    /// Header.
    pub head: Head,
    /// Bytes after the header.
    pub payload: Vec<u8>,
    /// Files attached to the message.
    pub files: Vec<File>,
}

impl<Head> Message<Head> {
    /// Returns the 32-bit number at `offset` of the payload.
    ///
    /// # Errors
    /// Fails if the message is too short.
    pub fn long(&self, offset: usize) -> Result<u32> {
        long(&self.payload, offset)
    }

    /// Returns the 64-bit number at `offset` of the payload.
    ///
    /// # Errors
    /// Fails if the message is too short.
    pub fn quad(&self, offset: usize) -> Result<u64> {
        let bytes = self.payload.get(offset..).and_then(<[u8]>::first_chunk).context("the message is too short")?;
        Ok(u64::from_ne_bytes(*bytes))
    }
}

/// Returns the 32-bit number at `offset` of a message.
///
/// # Errors
/// Fails if the message is too short.
pub fn long(bytes: &[u8], offset: usize) -> Result<u32> {
    let bytes = bytes.get(offset..).and_then(<[u8]>::first_chunk).context("the message is too short")?;
    Ok(u32::from_ne_bytes(*bytes))
}

/// Receives `len` bytes and adds the attached files to `files`. Returns `None` if the other side has closed the socket.
///
/// # Errors
/// Fails if the data cannot be received.
pub fn receive(socket: &UnixStream, len: usize, files: &mut Vec<File>) -> Result<Option<Vec<u8>>> {
    let mut bytes = vec![0; len];
    let mut done = 0;
    while done < len {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut bytes[done..])];
        let got = recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                files.extend(descriptors.map(File::from));
            }
        }
        if got == 0 {
            return Ok(None);
        }
        done += got;
    }
    Ok(Some(bytes))
}

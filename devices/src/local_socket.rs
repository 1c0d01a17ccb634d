// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Connections to unix sockets of other processes of the host.

use std::io;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use crate::inherited;

/// Connects to the process that listens at `path`. Fails immediately if the listener's queue is full. If `path` names an inherited
/// connection, returns the inherited connection instead ([`inherited::connection`]).
pub(crate) fn connect_now(path: &Path) -> io::Result<UnixStream> {
    if let Some(stream) = inherited::connection(path).transpose()? {
        stream.set_nonblocking(false)?;
        return Ok(stream);
    }
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::{AsRawFd, OwnedFd};

    use super::*;

    #[test]
    fn inherited_connection_is_blocking_and_used_only_once() {
        let (ours, mut server) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let number = ours.as_raw_fd();
        inherited::keep(number, OwnedFd::from(ours)).unwrap();
        let path = format!("/dev/fd/{number}");
        let mut stream = connect_now(Path::new(&path)).unwrap();
        let writer = std::thread::spawn(move || server.write_all(b"x").map(|()| server));
        stream.read_exact(&mut [0]).unwrap();
        drop(writer.join().unwrap().unwrap());
        assert!(connect_now(Path::new(&path)).unwrap_err().to_string().contains("was already used"));
    }
}

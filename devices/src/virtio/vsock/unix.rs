// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The host's side of connections: Unix stream sockets.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, connect, recv, socket_with,
};

use super::spec::PORT_ANY;
use crate::inherited::is_kept;
use crate::listening_socket::{Clients, ListeningSocket};

/// Maximum length of a client's first line: `CONNECT`, a space, a port, and a line break.
const MOST_LINE: usize = 32;

/// Socket that host programs connect to. The socket's file is removed when the listener is dropped, unless the socket was inherited.
pub struct Listener {
    socket: ListeningSocket,
    /// Path prefix of the sockets of host programs that serve ports. `None` if the listener is an inherited socket without an absolute
    /// path.
    path: Option<PathBuf>,
}

impl Listener {
    /// Creates a socket at `path`, and replaces a stale socket. If `path` names an inherited socket, uses this socket instead
    /// ([`inherited::listener`](crate::inherited::listener)). The path of a host program's socket is the listener's path, followed by `_`
    /// and the port. If the listener is an inherited socket without an absolute path, the guest cannot connect to host programs.
    ///
    /// # Errors
    /// The errors of [`ListeningSocket::for_part`].
    pub fn bind(path: &Path) -> io::Result<Self> {
        let socket = ListeningSocket::for_part(path, Clients::ByUmask)?;
        socket.listener().set_nonblocking(true)?;
        let path = match is_kept(path) {
            false => Some(path.to_path_buf()),
            true => {
                let bound = socket.listener().local_addr()?;
                bound.as_pathname().filter(|path| path.is_absolute()).map(Path::to_path_buf)
            }
        };
        Ok(Self { socket, path })
    }

    /// Returns the listening socket.
    pub(super) fn socket(&self) -> &UnixListener {
        self.socket.listener()
    }

    /// Accepts a waiting client. Returns `None` if no client waits.
    ///
    /// # Errors
    /// The process has no free file descriptor.
    pub(super) fn accept(&self) -> io::Result<Option<OwnedFd>> {
        loop {
            match accept_with(self.socket.listener(), SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
                Ok(client) => return Ok(Some(client)),
                Err(Errno::AGAIN) => return Ok(None),
                // The client has closed its socket, or a signal interrupted the call. In both cases, try again.
                Err(Errno::CONNABORTED | Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Connects to the host program that serves `port`, at `<path>_<port>`. Does not block.
    ///
    /// # Errors
    /// No program serves the port, or the program's listen queue is full.
    pub(super) fn connect(&self, port: u32) -> io::Result<OwnedFd> {
        let path = self.path.clone().ok_or(io::ErrorKind::NotFound)?;
        let mut path = path.into_os_string();
        path.push(format!("_{port}"));
        let address = SocketAddrUnix::new(Path::new(&path))?;
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &address)?;
        Ok(socket)
    }
}

/// First line of a client, as far as it was received.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Greeting {
    /// The line is incomplete.
    None,
    /// The client wants to connect to this port of the guest.
    Connect(u32),
    /// The line is invalid, or the client has closed its socket.
    Wrong,
}

/// Reads the first line of a client. Leaves all further bytes in the socket, because they are for the guest. `ended` is true if the client
/// sends no more data.
pub(super) fn greeting(client: &OwnedFd, ended: bool) -> Greeting {
    let mut line = [0; MOST_LINE];
    let seen = match recv(client, &mut line, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((_, seen)) => seen,
        Err(Errno::AGAIN | Errno::INTR) if !ended => return Greeting::None,
        Err(_) => return Greeting::Wrong,
    };
    let Some(end) = line[..seen].iter().position(|byte| *byte == b'\n') else {
        return if ended || seen == 0 || seen == MOST_LINE { Greeting::Wrong } else { Greeting::None };
    };
    match recv(client, &mut line[..=end], RecvFlags::DONTWAIT) {
        Ok((_, taken)) if taken == end + 1 => parse(&line[..end]).map_or(Greeting::Wrong, Greeting::Connect),
        _ => Greeting::Wrong,
    }
}

/// Returns the port of a line `CONNECT <port>`.
fn parse(line: &[u8]) -> Option<u32> {
    let (word, port) = std::str::from_utf8(line).ok()?.trim_end().split_once(' ')?;
    let port = port.bytes().all(|byte| byte.is_ascii_digit()).then_some(port)?;
    let port = word.eq_ignore_ascii_case("connect").then(|| port.parse().ok())??;
    (port != PORT_ANY).then_some(port)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{Read, Write};
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn client_lines_are_parsed_strictly() {
        for (line, port) in [
            ("CONNECT 1024", Some(1024)),
            ("connect 0", Some(0)),
            ("CONNECT 4294967294\r", Some(4_294_967_294)),
            ("CONNECT 4294967295", None),
            ("CONNECT 4294967296", None),
            ("CONNECT +1", None),
            ("CONNECT -1", None),
            ("CONNECT", None),
            ("CONNECT ", None),
            ("CONNECT 1 2", None),
            ("GET 1", None),
            ("", None),
        ] {
            assert_eq!(parse(line.as_bytes()), port, "{line:?}");
        }
        assert_eq!(parse(b"CONNECT \xff"), None);
    }

    #[test]
    fn greeting_reads_only_the_first_line() {
        let (ours, mut client) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let server = OwnedFd::from(ours.try_clone().unwrap());
        assert_eq!(greeting(&server, false), Greeting::None);
        client.write_all(b"CONN").unwrap();
        assert_eq!(greeting(&server, false), Greeting::None);
        assert_eq!(greeting(&server, true), Greeting::Wrong, "the client sends no more");
        client.write_all(b"ECT 7\nhello").unwrap();
        assert_eq!(greeting(&server, false), Greeting::Connect(7));
        let mut rest = [0; 16];
        assert_eq!((&ours).read(&mut rest).unwrap(), 5);
        client.write_all(&[b'x'; MOST_LINE]).unwrap();
        assert_eq!(greeting(&server, false), Greeting::Wrong, "the line is too long");
        let (_, gone) = (client, (&ours).read(&mut [0; 64]).unwrap());
        assert_eq!(gone, MOST_LINE);
        assert_eq!(greeting(&server, false), Greeting::Wrong, "the client is gone");
    }

    #[test]
    fn socket_file_is_exclusive_and_removed_on_drop() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = Listener::bind(&path).unwrap();
        let error = Listener::bind(&path).err().unwrap();
        assert_eq!(error.to_string(), "this VM uses this socket already: use another path");
        drop(listener);
        assert!(!path.exists());
        fs::write(&path, "a file").unwrap();
        assert_eq!(Listener::bind(&path).err().unwrap().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read_to_string(&path).unwrap(), "a file");
        fs::remove_file(&path).unwrap();
        // `bind` fails if a running process uses the socket. `bind` replaces a stale socket, whose process has ended.
        let other = UnixListener::bind(&path).unwrap();
        assert_eq!(
            Listener::bind(&path).err().unwrap().to_string(),
            "another process serves this socket: use another path"
        );
        drop(other);
        drop(Listener::bind(&path).unwrap());
        let listener = Listener::bind(&path).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "somebody else's").unwrap();
        drop(listener);
        assert!(path.exists(), "the file no longer belonged to the listener");
        assert_eq!(Listener::bind(&dir.path().join("no/s")).err().unwrap().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn inherited_socket_is_used_and_its_file_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let socket = OwnedFd::from(UnixListener::bind(&path).unwrap());
        let number = socket.as_raw_fd();
        crate::inherited::keep(number, socket).unwrap();
        let named = format!("/dev/fd/{number}");
        let listener = Listener::bind(Path::new(&named)).unwrap();
        assert!(Listener::bind(Path::new(&named)).is_err(), "another device uses the socket");
        let _client = UnixStream::connect(&path).unwrap();
        assert!(listener.accept().unwrap().is_some());
        let server = UnixListener::bind(dir.path().join("s_5000")).unwrap();
        drop(listener.connect(5000).unwrap());
        assert!(server.accept().is_ok() && listener.connect(5001).is_err());
        drop(listener);
        assert!(path.exists(), "the process that created the file removes it");
    }

    #[test]
    fn host_port_is_the_listener_path_with_the_port() {
        let dir = tempfile::tempdir().unwrap();
        let listener = Listener::bind(&dir.path().join("s")).unwrap();
        assert!(listener.connect(5000).is_err());
        let server = UnixListener::bind(dir.path().join("s_5000")).unwrap();
        let client = UnixStream::from(listener.connect(5000).unwrap());
        let (mut served, _) = server.accept().unwrap();
        (&client).write_all(b"x").unwrap();
        served.read_exact(&mut [0]).unwrap();
        assert!(listener.accept().unwrap().is_none());
    }
}

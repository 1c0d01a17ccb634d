// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The host's side of connections: stream sockets in the file system.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::linux::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use log::warn;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, connect, recv, socket_with,
};

use super::spec::PORT_ANY;
use crate::inherited::{self, InheritedListener};

/// Longest first line of a client: `CONNECT`, a blank, a port, and the end of the line.
const MOST_LINE: usize = 32;

/// The socket on which the host's programs reach the guest. Its file goes when it is dropped.
pub struct Listener {
    socket: UnixListener,
    /// What sockets of the host's programs are beside. One that was inherited may have no such name.
    path: Option<PathBuf>,
    /// Device and inode: what somebody has put there since is not removed.
    file: Option<(u64, u64)>,
    /// While it is there nobody else has one that was inherited.
    _in_use: Option<Arc<()>>,
}

impl Listener {
    /// Makes a socket at `path`, where nothing may be. One that was inherited takes its place ([`inherited::listener`]); the name that it
    /// was bound to, if that is an absolute path, is then what sockets of the host's programs are beside.
    ///
    /// # Errors
    /// Something is there, or what the host said.
    pub fn bind(path: &Path) -> io::Result<Self> {
        if let Some(inherited) = inherited::listener(path) {
            let InheritedListener { listener: socket, in_use } = inherited?;
            socket.set_nonblocking(true)?;
            let bound = socket.local_addr()?;
            let path = bound.as_pathname().filter(|path| path.is_absolute()).map(Path::to_path_buf);
            return Ok(Self { socket, path, file: None, _in_use: Some(in_use) });
        }
        let socket = UnixListener::bind(path).map_err(|error| match error.kind() {
            io::ErrorKind::AddrInUse => {
                io::Error::new(error.kind(), "exists already: remove it if no other VM listens there")
            }
            _ => error,
        })?;
        let file = match fs::symlink_metadata(path) {
            Ok(made) => Some((made.st_dev(), made.st_ino())),
            // Somebody may take it away at once, which is no error of ours.
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => {
                // It was made a moment ago. Where it cannot be removed either, that has the same reason.
                let _ = fs::remove_file(path);
                return Err(error);
            }
        };
        let listener = Self { socket, path: Some(path.into()), file, _in_use: None };
        listener.socket.set_nonblocking(true)?;
        Ok(listener)
    }

    /// Its descriptor.
    pub(super) fn socket(&self) -> &UnixListener {
        &self.socket
    }

    /// A client that waits; `None` if there is none.
    ///
    /// # Errors
    /// The process can have no more descriptors.
    pub(super) fn accept(&self) -> io::Result<Option<OwnedFd>> {
        loop {
            match accept_with(&self.socket, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
                Ok(client) => return Ok(Some(client)),
                Err(Errno::AGAIN) => return Ok(None),
                // It has gone meanwhile.
                Err(Errno::CONNABORTED | Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Connects to the program of the host that serves `port`: `<path>_<port>`. Does not wait.
    ///
    /// # Errors
    /// Nobody is there, or too many wait for them.
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

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(path) = &self.path
            && self.file.is_some()
            && self.file == file_at(path)
            && let Err(error) = fs::remove_file(path)
        {
            warn!("removing the socket {}: {error}", path.display());
        }
    }
}

fn file_at(path: &Path) -> Option<(u64, u64)> {
    fs::symlink_metadata(path).ok().map(|found| (found.st_dev(), found.st_ino()))
}

/// What a client has said so far.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Greeting {
    /// No whole line.
    None,
    /// It wants this port of the guest's.
    Connect(u32),
    /// Nothing that can be answered, or it is gone.
    Wrong,
}

/// Reads the first line of a client, and not a byte more: what follows is for the guest. `ended`: no more will come.
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

/// The port of `CONNECT <port>`.
fn parse(line: &[u8]) -> Option<u32> {
    let (word, port) = std::str::from_utf8(line).ok()?.trim_end().split_once(' ')?;
    let port = port.bytes().all(|byte| byte.is_ascii_digit()).then_some(port)?;
    let port = word.eq_ignore_ascii_case("connect").then(|| port.parse().ok())??;
    (port != PORT_ANY).then_some(port)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn lines_of_clients_are_read_strictly() {
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
    fn greeting_takes_the_line_and_leaves_what_follows() {
        let (ours, mut client) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let server = OwnedFd::from(ours.try_clone().unwrap());
        assert_eq!(greeting(&server, false), Greeting::None);
        client.write_all(b"CONN").unwrap();
        assert_eq!(greeting(&server, false), Greeting::None);
        assert_eq!(greeting(&server, true), Greeting::Wrong, "no more comes");
        client.write_all(b"ECT 7\nhello").unwrap();
        assert_eq!(greeting(&server, false), Greeting::Connect(7));
        let mut rest = [0; 16];
        assert_eq!((&ours).read(&mut rest).unwrap(), 5);
        client.write_all(&[b'x'; MOST_LINE]).unwrap();
        assert_eq!(greeting(&server, false), Greeting::Wrong, "a line has an end");
        let (_, gone) = (client, (&ours).read(&mut [0; 64]).unwrap());
        assert_eq!(gone, MOST_LINE);
        assert_eq!(greeting(&server, false), Greeting::Wrong, "nobody is there");
    }

    #[test]
    fn socket_file_is_the_listeners_own_and_goes_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = Listener::bind(&path).unwrap();
        let error = Listener::bind(&path).err().unwrap();
        assert!(error.to_string().starts_with("exists already"), "{error}");
        drop(listener);
        assert!(!path.exists());
        fs::write(&path, "a file").unwrap();
        assert_eq!(Listener::bind(&path).err().unwrap().kind(), io::ErrorKind::AddrInUse);
        fs::remove_file(&path).unwrap();
        let listener = Listener::bind(&path).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "somebody else's").unwrap();
        drop(listener);
        assert!(path.exists(), "it was not the listener's any more");
        assert_eq!(Listener::bind(&dir.path().join("no/s")).err().unwrap().kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn socket_that_was_inherited_is_listened_on_and_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let socket = OwnedFd::from(UnixListener::bind(&path).unwrap());
        let number = socket.as_raw_fd();
        inherited::keep(number, socket).unwrap();
        let named = format!("/dev/fd/{number}");
        let listener = Listener::bind(Path::new(&named)).unwrap();
        assert!(Listener::bind(Path::new(&named)).is_err(), "another device has it");
        let _client = UnixStream::connect(&path).unwrap();
        assert!(listener.accept().unwrap().is_some());
        let server = UnixListener::bind(dir.path().join("s_5000")).unwrap();
        drop(listener.connect(5000).unwrap());
        assert!(server.accept().is_ok() && listener.connect(5001).is_err());
        drop(listener);
        assert!(path.exists(), "whoever made it removes it");
    }

    #[test]
    fn ports_of_the_host_are_sockets_beside_the_listeners() {
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

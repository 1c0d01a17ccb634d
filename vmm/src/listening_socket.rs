// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A unix socket that clients of the VMM connect to: only its owner can, a live one is never taken over, and none is left behind.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, flock};
use rustix::io::Errno;
use rustix::net::AddressFamily;
use rustix::net::sockopt::{socket_acceptconn, socket_domain};
use rustix::process::umask;

/// A listening socket. Dropping it removes its file.
pub struct ListeningSocket {
    listener: UnixListener,
    /// The file, and what it was when it was made.
    file: Option<(PathBuf, Identity)>,
}

type Identity = (u64, u64);

/// How long to wait for the directory while others that start lock it.
const PATIENCE: Duration = Duration::from_secs(1);

fn identity(path: &Path) -> io::Result<Identity> {
    let metadata = fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

impl ListeningSocket {
    /// Makes a socket at `path` that only this user can connect to. A socket that nobody serves any more is replaced. To be
    /// called by the main thread, which alone makes files, as it sets the umask for a moment.
    ///
    /// # Errors
    /// Somebody serves a socket there, something else is there, or it cannot be made.
    pub fn bind(path: &Path) -> io::Result<Self> {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        // Two that start at once must not both find a stale socket and replace each other's new one.
        let directory = File::open(parent)?;
        lock(&directory)?;
        remove_stale(path)?;
        let before = umask(Mode::RWXG | Mode::RWXO | Mode::XUSR);
        let listener = UnixListener::bind(path);
        umask(before);
        let listener = listener?;
        Ok(Self { listener, file: Some((path.to_path_buf(), identity(path)?)) })
    }

    /// Takes a listening unix socket that the parent process made.
    ///
    /// # Errors
    /// It is not one.
    pub fn inherited(fd: OwnedFd) -> io::Result<Self> {
        if socket_domain(&fd)? != AddressFamily::UNIX || !socket_acceptconn(&fd)? {
            return Err(io::Error::other("it is no listening unix socket"));
        }
        Ok(Self { listener: UnixListener::from(fd), file: None })
    }

    /// The socket itself.
    pub fn listener(&self) -> &UnixListener {
        &self.listener
    }
}

impl Drop for ListeningSocket {
    fn drop(&mut self) {
        let Some((path, made)) = &self.file else { return };
        // Whoever has put another there meanwhile keeps it.
        if identity(path).is_ok_and(|now| now == *made)
            && let Err(error) = fs::remove_file(path)
        {
            log::warn!("removing the socket {}: {error}", path.display());
        }
    }
}

/// Locks the directory, unless somebody else has it locked for longer than the likes of us do: whoever may read it can.
fn lock(directory: &File) -> io::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match flock(directory, FlockOperation::NonBlockingLockExclusive) {
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => thread::sleep(PATIENCE / 100),
            Err(Errno::WOULDBLOCK) => {
                return Err(io::Error::new(
                    io::ErrorKind::WouldBlock,
                    "another process keeps its directory locked (flock)",
                ));
            }
            other => return Ok(other?),
        }
    }
}

/// Removes a socket that nobody serves.
fn remove_stale(path: &Path) -> io::Result<()> {
    let metadata = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    if !metadata.file_type().is_socket() {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "something that is no socket is there"));
    }
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
        Ok(_) => Err(io::Error::new(io::ErrorKind::AddrInUse, "another process serves this socket")),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn socket_is_its_owners_only_and_removed_at_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api.sock");
        let socket = ListeningSocket::bind(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
        drop(socket);
        assert!(!path.exists());
    }

    #[test]
    fn live_socket_is_refused_and_a_stale_one_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api.sock");
        let socket = ListeningSocket::bind(&path).unwrap();
        let error = ListeningSocket::bind(&path).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse, "{error}");
        assert!(path.exists());
        drop(socket);

        // As a process leaves it that was killed.
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let socket = ListeningSocket::bind(&path).unwrap();
        UnixStream::connect(&path).unwrap();
        drop(socket);
    }

    #[test]
    fn directory_that_stays_locked_is_an_error_and_one_that_is_let_go_none() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api.sock");
        let holder = File::open(dir.path()).unwrap();
        flock(&holder, FlockOperation::LockExclusive).unwrap();
        let error = ListeningSocket::bind(&path).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
        let waiting = thread::spawn(move || ListeningSocket::bind(&path).map(drop));
        thread::sleep(PATIENCE / 20);
        drop(holder);
        waiting.join().unwrap().unwrap();
    }

    #[test]
    fn other_files_are_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "precious").unwrap();
        assert!(ListeningSocket::bind(&path).is_err());
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
        assert!(ListeningSocket::bind(&dir.path().join("no/such/directory")).is_err());

        let path = dir.path().join("api.sock");
        let socket = ListeningSocket::bind(&path).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "somebody else's").unwrap();
        drop(socket);
        assert!(path.exists());
    }

    #[test]
    fn inherited_descriptor_must_be_a_listening_socket() {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("s")).unwrap();
        assert!(ListeningSocket::inherited(listener.into()).is_ok());
        assert!(ListeningSocket::inherited(tempfile::tempfile().unwrap().into()).is_err());
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(ListeningSocket::inherited(tcp.into()).is_err());
        let (one, _other) = UnixStream::pair().unwrap();
        assert!(ListeningSocket::inherited(one.into()).is_err());
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Unix sockets that clients of the VMM connect to. A new socket replaces a stale socket at the same path. A new socket never replaces
//! another kind of file, or a socket that a process serves. Dropping a socket removes its file.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, fchmod, flock};
use rustix::io::Errno;
use rustix::net::sockopt::{socket_acceptconn, socket_domain};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with};

use crate::inherited::{self, InheritedListener};
use crate::sync::lock;

/// A listening socket. Dropping this value removes the socket's file.
pub struct ListeningSocket {
    listener: UnixListener,
    /// Path and identity of the socket's file at creation. `None` for an inherited socket.
    file: Option<(PathBuf, Identity)>,
    /// While this value exists, no other part of the VM can use the inherited socket.
    _in_use: Option<Arc<()>>,
}

type Identity = (u64, u64);

/// Sockets of this process. If the path of a new socket already leads to one of these sockets, the error must not blame another process.
static OWN: Mutex<Vec<Identity>> = Mutex::new(Vec::new());

/// Users who may connect to a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clients {
    /// The user of this process only.
    Owner,
    /// All users that the process's umask allows.
    ByUmask,
}

/// Maximum time to wait for other processes that create a socket at the same path.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Pause between two attempts to take the lock file.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Maximum number of clients that wait to be accepted. -1 stands for the host's maximum.
const MOST_WAITING: i32 = -1;

fn identity(path: &Path) -> io::Result<Identity> {
    let metadata = fs::symlink_metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

impl ListeningSocket {
    /// Creates a socket at `path` that only this user can connect to. Replaces a stale socket.
    ///
    /// # Errors
    /// A process serves a socket at `path`, `path` is another kind of file, or the host cannot create the socket.
    pub fn bind(path: &Path) -> io::Result<Self> {
        Self::bind_for(path, Clients::Owner)
    }

    fn bind_for(path: &Path, clients: Clients) -> io::Result<Self> {
        // If two processes start at the same time, both could find a stale socket and replace each other's new socket. The lock prevents
        // this.
        let _lock = StartLock::take(path, TIMEOUT)?;
        remove_stale(path)?;
        let listener = match clients {
            Clients::ByUmask => UnixListener::bind(path),
            Clients::Owner => listen_for_owner(path),
        }?;
        let identity = identity(path).inspect_err(|_| {
            // Remove the new file. Ignore an error of the removal, because the first error probably has the same cause.
            let _ = fs::remove_file(path);
        })?;
        lock(&OWN).push(identity);
        Ok(Self { listener, file: Some((path.to_path_buf(), identity)), _in_use: None })
    }

    /// Creates a socket for a part of the VM. If `path` is `/dev/fd/N`, uses the inherited socket with this number.
    ///
    /// # Errors
    /// For a path, the errors of [`Self::bind`]. For an inherited socket, the descriptor is not a listening socket, or another part of the
    /// VM uses the socket.
    pub fn for_part(path: &Path, clients: Clients) -> io::Result<Self> {
        let Some(inherited) = inherited::listener(path) else { return Self::bind_for(path, clients) };
        let InheritedListener { listener, in_use } = inherited?;
        Ok(Self { listener, file: None, _in_use: Some(in_use) })
    }

    /// Uses a listening unix socket that the parent process created.
    ///
    /// # Errors
    /// The descriptor is not a listening unix socket.
    pub fn inherited(fd: OwnedFd) -> io::Result<Self> {
        if socket_domain(&fd)? != AddressFamily::UNIX || !socket_acceptconn(&fd)? {
            return Err(io::Error::other(
                "the descriptor is not a listening unix socket: pass the descriptor of a unix socket that listens",
            ));
        }
        Ok(Self { listener: UnixListener::from(fd), file: None, _in_use: None })
    }

    /// Returns the socket.
    pub fn listener(&self) -> &UnixListener {
        &self.listener
    }
}

/// Creates a socket at `path` that only this user can connect to.
fn listen_for_owner(path: &Path) -> io::Result<UnixListener> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // Set the socket's mode before `bind`, because the new file gets this mode, restricted by the umask (`unix_bind_bsd()` of Linux'
    // net/unix/af_unix.c). A temporary umask would also affect files that other threads create.
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    listen(&socket, MOST_WAITING)?;
    Ok(socket.into())
}

impl Drop for ListeningSocket {
    fn drop(&mut self) {
        let Some((path, made)) = &self.file else { return };
        lock(&OWN).retain(|own| own != made);
        // Keep the file if another process has replaced it since this process created the socket.
        if identity(path).is_ok_and(|now| now == *made)
            && let Err(error) = fs::remove_file(path)
        {
            log::warn!("cannot remove the socket {}: {error}; remove the file yourself", path.display());
        }
    }
}

/// Lock file of a process that creates a socket. The file is in the directory of the socket, and only this user can open and lock the file.
/// Dropping the lock removes the file.
struct StartLock {
    file: File,
    path: PathBuf,
}

impl StartLock {
    /// Waits for other processes that create a socket at the same path. The wait is limited, because one of these processes may be stopped.
    fn take(socket: &Path, timeout: Duration) -> io::Result<Self> {
        let mut name = socket.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_os_string();
        name.push(".lock");
        let path = socket.with_file_name(name);
        let deadline = Instant::now() + timeout;
        loop {
            let mut options = File::options();
            // Another user of the directory may have put a link or a FIFO at this path. The flags prevent following the link and waiting
            // for the FIFO.
            let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
            let options = options.write(true).create(true).truncate(false).mode(0o600).custom_flags(flags);
            let file = options.open(&path)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                // After this process opened the file, the previous owner of the lock may have removed the file.
                Ok(()) if is_at(&file, &path) => return Ok(Self { file, path }),
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) if Instant::now() < deadline => thread::sleep(LOOK_AGAIN),
                Err(Errno::WOULDBLOCK) => {
                    let text = format!(
                        "another process holds the lock {}; end that process or try again later",
                        path.display()
                    );
                    return Err(io::Error::new(io::ErrorKind::WouldBlock, text));
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Drop for StartLock {
    fn drop(&mut self) {
        if is_at(&self.file, &self.path)
            && let Err(error) = fs::remove_file(&self.path)
        {
            log::warn!("cannot remove the lock file {}: {error}; remove the file yourself", self.path.display());
        }
    }
}

fn is_at(file: &File, path: &Path) -> bool {
    let opened = file.metadata().map(|metadata| (metadata.dev(), metadata.ino()));
    matches!((opened, identity(path)), (Ok(opened), Ok(there)) if opened == there)
}

/// Removes a socket that no process serves.
fn remove_stale(path: &Path) -> io::Result<()> {
    let metadata = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    if !metadata.file_type().is_socket() {
        return Err(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "the path names a file that is not a socket: remove the file, or use another path",
        ));
    }
    if lock(&OWN).contains(&(metadata.dev(), metadata.ino())) {
        return Err(io::Error::new(io::ErrorKind::AddrInUse, "this VM uses this socket already: use another path"));
    }
    // Connect without waiting for room in the server's queue, because the server may never make room.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let client = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    match connect(&client, &SocketAddrUnix::new(path)?) {
        Err(Errno::CONNREFUSED) => fs::remove_file(path),
        Err(Errno::NOENT) => Ok(()),
        Ok(()) | Err(Errno::AGAIN) => {
            Err(io::Error::new(io::ErrorKind::AddrInUse, "another process serves this socket: use another path"))
        }
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use rustix::fs::{CWD, FileType, mknodat};

    use super::*;

    #[test]
    fn socket_is_private_to_its_owner_and_removed_on_drop() {
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
        assert_eq!(error.to_string(), "this VM uses this socket already: use another path");
        assert!(path.exists());
        drop(socket);
        // This socket is not a `ListeningSocket` of this process, so it stands for a socket of another process.
        let other = UnixListener::bind(&path).unwrap();
        let error = ListeningSocket::bind(&path).err().unwrap();
        assert_eq!(error.to_string(), "another process serves this socket: use another path");
        drop(other);
        fs::remove_file(&path).unwrap();

        // A killed process has left its socket behind.
        drop(UnixListener::bind(&path).unwrap());
        assert!(path.exists());
        let socket = ListeningSocket::bind(&path).unwrap();
        std::os::unix::net::UnixStream::connect(&path).unwrap();
        drop(socket);
    }

    #[test]
    fn socket_for_other_users_has_the_mode_of_the_umask() {
        let dir = tempfile::tempdir().unwrap();
        let plain = UnixListener::bind(dir.path().join("plain")).unwrap();
        let _socket = ListeningSocket::for_part(&dir.path().join("s"), Clients::ByUmask).unwrap();
        let mode = |name: &str| fs::metadata(dir.path().join(name)).unwrap().permissions().mode();
        assert_eq!(mode("s"), mode("plain"));
        drop(plain);
    }

    /// Checks that a lock on the directory does not prevent a new socket, because any user who may read the directory can lock it.
    #[test]
    fn locked_directory_does_not_prevent_a_new_socket() {
        let dir = tempfile::tempdir().unwrap();
        let holder = File::open(dir.path()).unwrap();
        flock(&holder, FlockOperation::LockExclusive).unwrap();
        let socket = ListeningSocket::bind(&dir.path().join("api.sock")).unwrap();
        drop(socket);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "a file is left");
    }

    #[test]
    fn held_lock_is_an_error_and_a_released_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api.sock");
        let holder = StartLock::take(&path, Duration::ZERO).unwrap();
        let mode = fs::metadata(&holder.path).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o600);
        let error = StartLock::take(&path, Duration::ZERO).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}");
        // If the lock is never released, this time limit ends the test.
        let waiting = thread::spawn(move || StartLock::take(&path, Duration::from_secs(600)).map(drop));
        drop(holder);
        waiting.join().unwrap().unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "a file is left");
    }

    #[test]
    fn only_one_of_many_concurrent_starts_gets_the_socket() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api.sock");
        drop(UnixListener::bind(&path).unwrap());
        let starts: Vec<_> = (0..16)
            .map(|_| {
                thread::spawn({
                    let path = path.clone();
                    move || ListeningSocket::bind(&path)
                })
            })
            .collect();
        let made: Vec<_> = starts.into_iter().map(|start| start.join().unwrap()).collect();
        assert_eq!(made.iter().filter(|made| made.is_ok()).count(), 1);
        assert!(path.exists());
    }

    #[test]
    fn socket_with_a_full_queue_is_in_use() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api.sock");
        let socket = ListeningSocket::bind(&path).unwrap();
        listen(socket.listener(), 0).unwrap();
        let mut waiting = Vec::new();
        let address = SocketAddrUnix::new(&path).unwrap();
        let full = loop {
            let client = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::NONBLOCK, None).unwrap();
            match connect(&client, &address) {
                Ok(()) => waiting.push(client),
                Err(error) => break error,
            }
        };
        assert_eq!(full, Errno::AGAIN);
        let error = ListeningSocket::bind(&path).err().unwrap();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse, "{error}");
    }

    #[test]
    fn files_of_other_kinds_or_owners_are_kept() {
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
    fn fifo_in_place_of_the_lock_is_an_error_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let fifo = dir.path().join("api.sock.lock");
        mknodat(CWD, &fifo, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let error = ListeningSocket::bind(&dir.path().join("api.sock")).err().unwrap();
        assert_eq!(error.raw_os_error(), Some(libc::ENXIO), "{error}");
    }

    #[test]
    fn inherited_descriptor_must_be_a_listening_socket() {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("s")).unwrap();
        assert!(ListeningSocket::inherited(listener.into()).is_ok());
        assert!(ListeningSocket::inherited(tempfile::tempfile().unwrap().into()).is_err());
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(ListeningSocket::inherited(tcp.into()).is_err());
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        assert!(ListeningSocket::inherited(one.into()).is_err());
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Other end of a [`Line`](super::Line): a pseudoterminal, or the client of a socket. The peer may be absent.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use devices::listening_socket::{Clients, ListeningSocket};
use devices::virtio::console::Size;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::pty::{OpenptFlags, grantpt, ioctl_tiocgptpeer, openpt, ptsname, unlockpt};
use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};

use super::receiver::size_of;

/// Interval of checks whether a process has opened the pseudoterminal or changed its size. The kernel does not report these events.
const LOOK: Duration = Duration::from_millis(250);

/// Other end of a line.
pub(super) enum Peer {
    /// A pseudoterminal.
    Pty {
        /// Side of the pseudoterminal that stays in this process.
        file: File,
        /// True if another process has the other side open.
        open: bool,
    },
    /// The client of a socket: only the latest client is served.
    Socket {
        /// Socket that clients connect to.
        socket: ListeningSocket,
        /// Connected client.
        client: Option<UnixStream>,
    },
}

impl Peer {
    /// Creates a pseudoterminal in raw mode. Also returns the path of its other side.
    ///
    /// # Errors
    /// The host does not support pseudoterminals, or has reached its limit of pseudoterminals.
    pub(super) fn pty() -> io::Result<(Self, PathBuf)> {
        let pty = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        grantpt(&pty)?;
        unlockpt(&pty)?;
        // The other side is opened by descriptor, because its path may belong to another mount of devpts.
        let other = ioctl_tiocgptpeer(&pty, OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        let mut settings = tcgetattr(&other)?;
        settings.make_raw();
        tcsetattr(&other, OptionalActions::Now, &settings)?;
        let path = PathBuf::from(std::ffi::OsString::from_vec(ptsname(&pty, Vec::new())?.into_bytes()));
        set_nonblocking(&pty)?;
        Ok((Self::Pty { file: pty.into(), open: false }, path))
    }

    /// Creates a socket that only this user can connect to.
    ///
    /// # Errors
    /// As for [`ListeningSocket::for_part`].
    pub(super) fn socket(path: &Path) -> io::Result<Self> {
        let socket = ListeningSocket::for_part(path, Clients::Owner)?;
        socket.listener().set_nonblocking(true)?;
        Ok(Self::Socket { socket, client: None })
    }

    /// True if a peer is connected.
    pub(super) fn is_there(&self) -> bool {
        match self {
            Self::Pty { open, .. } => *open,
            Self::Socket { client, .. } => client.is_some(),
        }
    }

    /// Returns the size of the terminal, if the line is a pseudoterminal with a peer.
    pub(super) fn size(&self) -> Option<Size> {
        match self {
            Self::Pty { file, open: true } => size_of(file).ok(),
            Self::Pty { .. } | Self::Socket { .. } => None,
        }
    }

    /// Accepts new peers. Call it before each [`Self::wait`].
    pub(super) fn look(&mut self) {
        match self {
            Self::Pty { file, open } => *open = *open || !has_hung_up(file.as_fd()),
            Self::Socket { socket, client } => {
                while let Ok((new, _)) = socket.listener().accept() {
                    if new.set_nonblocking(true).is_ok()
                        && let Some(old) = client.replace(new)
                    {
                        // The old client may have disconnected already.
                        let _ = old.shutdown(Shutdown::Both);
                    }
                }
            }
        }
    }

    /// Waits until `wake` is readable, a peer connects or disconnects, or `limit` is over. If `read` is set, the wait also ends when input
    /// is available. If `write` is set, the wait also ends when the peer has room for output. If `look` is set, the wait ends after
    /// [`LOOK`] at the latest, so that the caller can check the terminal's size.
    pub(super) fn wait(
        &self,
        wake: BorrowedFd<'_>,
        read: bool,
        write: bool,
        look: bool,
        limit: Option<Duration>,
    ) -> io::Result<()> {
        let mut wanted = PollFlags::empty();
        wanted.set(PollFlags::IN, read);
        wanted.set(PollFlags::OUT, write);
        let mut limit = limit;
        let mut fds = vec![PollFd::from_borrowed_fd(wake, PollFlags::IN)];
        match self {
            Self::Pty { file, open } => {
                if *open {
                    fds.push(PollFd::new(file, wanted));
                }
                if look || !open {
                    limit = Some(limit.map_or(LOOK, |limit| limit.min(LOOK)));
                }
            }
            Self::Socket { socket, client } => {
                fds.push(PollFd::new(socket.listener(), PollFlags::IN));
                fds.extend(client.as_ref().map(|client| PollFd::new(client, wanted)));
            }
        }
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        match poll(&mut fds, limit.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Reads available input, without waiting. Returns 0 if no input is available. Forgets a peer that has disconnected.
    pub(super) fn read(&mut self, buffer: &mut [u8]) -> usize {
        let read = match self {
            Self::Pty { file, open: true } => file.read(buffer),
            Self::Socket { client: Some(client), .. } => client.read(buffer),
            _ => return 0,
        };
        match read {
            Ok(len) if len > 0 => len,
            Err(error) if is_for_later(&error) => 0,
            // End of the stream. A pseudoterminal reports the end as an error.
            _ => {
                self.forget();
                0
            }
        }
    }

    /// Writes as many bytes as the peer has room for, without waiting, and returns their number. Forgets a peer that has disconnected.
    pub(super) fn write(&mut self, bytes: &[u8]) -> usize {
        let written = match self {
            Self::Pty { file, open: true } => file.write(bytes),
            Self::Socket { client: Some(client), .. } => client.write(bytes),
            _ => return 0,
        };
        written.unwrap_or_else(|error| {
            if !is_for_later(&error) {
                self.forget();
            }
            0
        })
    }

    fn forget(&mut self) {
        match self {
            Self::Pty { open, .. } => *open = false,
            Self::Socket { client, .. } => *client = None,
        }
    }
}

fn is_for_later(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

/// True if no process has the other side of a pseudoterminal open.
fn has_hung_up(pty: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(pty, PollFlags::empty())];
    let looked = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    looked.is_err() || fds[0].revents().contains(PollFlags::HUP)
}

fn set_nonblocking(file: impl AsFd) -> io::Result<()> {
    Ok(fcntl_setfl(&file, fcntl_getfl(&file)? | OFlags::NONBLOCK)?)
}

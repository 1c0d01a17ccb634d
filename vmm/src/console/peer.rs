// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The other end of a [`Line`](super::Line): a pseudoterminal, or the client of a socket. Nobody may be there.

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

/// How often to look whether somebody has opened the pseudoterminal, or given it another size. The kernel wakes nobody for it.
const LOOK: Duration = Duration::from_millis(250);

/// The other end of a line.
pub(super) enum Peer {
    /// The side of a pseudoterminal that stays here.
    Pty {
        /// It.
        file: File,
        /// Whether somebody has the other side open.
        open: bool,
    },
    /// One client at a time: the last one that came.
    Socket {
        /// Where they come.
        socket: ListeningSocket,
        /// The one that is there.
        client: Option<UnixStream>,
    },
}

impl Peer {
    /// Makes a pseudoterminal in raw mode; returns the path of its other side too.
    ///
    /// # Errors
    /// The host has no more of them, or none.
    pub(super) fn pty() -> io::Result<(Self, PathBuf)> {
        let pty = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        grantpt(&pty)?;
        unlockpt(&pty)?;
        // By descriptor, as the path may be of another mount of the file system.
        let other = ioctl_tiocgptpeer(&pty, OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)?;
        let mut settings = tcgetattr(&other)?;
        settings.make_raw();
        tcsetattr(&other, OptionalActions::Now, &settings)?;
        let path = PathBuf::from(std::ffi::OsString::from_vec(ptsname(&pty, Vec::new())?.into_bytes()));
        set_nonblocking(&pty)?;
        Ok((Self::Pty { file: pty.into(), open: false }, path))
    }

    /// Makes a socket that this user can connect to.
    ///
    /// # Errors
    /// Those of [`ListeningSocket::for_part`].
    pub(super) fn socket(path: &Path) -> io::Result<Self> {
        let socket = ListeningSocket::for_part(path, Clients::Owner)?;
        socket.listener().set_nonblocking(true)?;
        Ok(Self::Socket { socket, client: None })
    }

    /// Whether somebody is there.
    pub(super) fn is_there(&self) -> bool {
        match self {
            Self::Pty { open, .. } => *open,
            Self::Socket { client, .. } => client.is_some(),
        }
    }

    /// The size of the terminal, if it is one and somebody is there.
    pub(super) fn size(&self) -> Option<Size> {
        match self {
            Self::Pty { file, open: true } => size_of(file).ok(),
            Self::Pty { .. } | Self::Socket { .. } => None,
        }
    }

    /// Looks who has come. To be called before each [`Self::wait`].
    pub(super) fn look(&mut self) {
        match self {
            Self::Pty { file, open } => *open = *open || !has_hung_up(file.as_fd()),
            Self::Socket { socket, client } => {
                while let Ok((new, _)) = socket.listener().accept() {
                    if new.set_nonblocking(true).is_ok()
                        && let Some(old) = client.replace(new)
                    {
                        // It may be gone already.
                        let _ = old.shutdown(Shutdown::Both);
                    }
                }
            }
        }
    }

    /// Waits until `wake` can be read, somebody comes or goes, there is something to read if `read`, there is room to write if
    /// `write`, or `limit` is over. With `look` it is time after a while to see whether the terminal has another size.
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

    /// Reads what there is, without waiting. 0 if there is nothing. Whoever has gone is forgotten.
    pub(super) fn read(&mut self, buffer: &mut [u8]) -> usize {
        let read = match self {
            Self::Pty { file, open: true } => file.read(buffer),
            Self::Socket { client: Some(client), .. } => client.read(buffer),
            _ => return 0,
        };
        match read {
            Ok(len) if len > 0 => len,
            Err(error) if is_for_later(&error) => 0,
            // The end of a stream; of a pseudoterminal that is an error.
            _ => {
                self.forget();
                0
            }
        }
    }

    /// Writes what there is room for, without waiting; returns how much. Whoever has gone is forgotten.
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

/// Whether nobody has the other side of a pseudoterminal open.
fn has_hung_up(pty: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(pty, PollFlags::empty())];
    let looked = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    looked.is_err() || fds[0].revents().contains(PollFlags::HUP)
}

fn set_nonblocking(file: impl AsFd) -> io::Result<()> {
    Ok(fcntl_setfl(&file, fcntl_getfl(&file)? | OFlags::NONBLOCK)?)
}

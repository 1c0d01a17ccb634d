// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Descriptors that the process inherited when it was started: of KVM, IOMMUFD, VFIO devices, tap interfaces, files and sockets. The
//! process uses these descriptors instead of opening the same objects. A path `/dev/fd/N` names an inherited file or socket.
//!
//! Carom determines the kind of a device's descriptor from the device number (`st_rdev`) and sysfs. The path that the parent process opened
//! does not matter.

mod kind;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, Weak};

use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::fcntl_dupfd_cloexec;

use crate::sync::lock;
use kind::{Kind, identify};

struct Kept {
    number: i32,
    /// `None` after the descriptor was handed over to its only user.
    file: Option<File>,
    kind: Kind,
    /// If only one user at a time may have the descriptor, this reference is valid while the descriptor is in use.
    in_use: Weak<()>,
}

static KEPT: Mutex<Vec<Kept>> = Mutex::new(Vec::new());

/// Intended use of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The file is read.
    Read,
    /// The file is read and written at any offset.
    ReadWrite,
    /// The file is written from its current position, or at its end.
    Append,
}

/// Listening socket that only one part of the VM can use at a time.
#[derive(Debug)]
pub struct InheritedListener {
    /// The socket.
    pub listener: UnixListener,
    /// While this value exists, no other part of the VM can use the socket.
    pub in_use: Arc<()>,
}

/// Keeps `fd` for later use. `number` is the number that the descriptor had when the process was started.
///
/// # Errors
/// The descriptor is of a kind that Carom does not use, or that can only be opened by its path.
pub fn keep(number: i32, fd: OwnedFd) -> io::Result<()> {
    let file = File::from(fd);
    let kind = identify(&file)?;
    let mut kept = lock(&KEPT);
    if kind.is_one_of_a_kind() && kept.iter().any(|other| other.kind == kind) {
        return Err(io::Error::other("another inherited descriptor refers to the same device: pass only one of them"));
    }
    // Forget an earlier descriptor with this number if it was handed over to its only user. The user has closed the descriptor, so its
    // number could be reused.
    kept.retain(|other| other.number != number || other.file.is_some());
    kept.push(Kept { number, file: Some(file), kind, in_use: Weak::new() });
    Ok(())
}

/// Duplicates the first kept descriptor of `kind`.
fn another(kind: &Kind) -> Option<io::Result<OwnedFd>> {
    let kept = lock(&KEPT);
    let file = kept.iter().find(|kept| kept.kind == *kind)?.file.as_ref()?;
    Some(fcntl_dupfd_cloexec(file.as_fd(), 3).map_err(io::Error::from))
}

/// Returns a descriptor of KVM, if one was kept.
pub fn kvm() -> Option<io::Result<OwnedFd>> {
    another(&Kind::Kvm)
}

/// Returns a descriptor of IOMMUFD, if one was kept.
pub(crate) fn iommufd() -> Option<io::Result<File>> {
    another(&Kind::Iommufd).map(|fd| fd.map(File::from))
}

/// Returns the descriptor of VFIO's character device for a function, if one was kept. `function` is the function's directory in sysfs,
/// without symbolic links. Returns the descriptor only once, because the kernel binds the descriptor to an IOMMUFD until the descriptor is
/// closed.
pub(crate) fn vfio_device(function: &Path) -> Option<File> {
    let mut kept = lock(&KEPT);
    let place = kept.iter().position(|kept| matches!(&kept.kind, Kind::VfioDevice(of) if of == function))?;
    kept.swap_remove(place).file
}

/// True if `path` is `/dev/fd/N` or `/proc/self/fd/N`, and a descriptor with the number N was kept.
pub fn is_kept(path: &Path) -> bool {
    with_kept(path, |_| ()).is_some()
}

/// Returns a duplicate of the kept descriptor N, if `path` is `/dev/fd/N` or `/proc/self/fd/N`. Returns `None` if no such descriptor was
/// kept. The duplicate and the kept descriptor share one open file and its position. This function does not check the file's permissions,
/// because the file is already open.
///
/// # Errors
/// The descriptor is not a file or block device, or is not open for this access. For [`Access::Append`], the descriptor may also be a pipe.
pub fn file(path: &Path, access: Access) -> Option<io::Result<File>> {
    with_kept(path, |kept| {
        let file = match (kept.kind == Kind::Pipe, access) {
            (true, Access::Append) => kept.get(),
            _ => kept.of(&Kind::File),
        }?;
        check_access(file, access)?;
        file.try_clone()
    })
}

/// Like [`file()`], for a source of random bytes, or a file or pipe that contains random bytes.
///
/// # Errors
/// The descriptor is of another kind, or is not open for reading.
pub fn random_source(path: &Path) -> Option<io::Result<File>> {
    with_kept(path, |kept| {
        let file = match kept.kind {
            Kind::Random | Kind::Pipe => kept.get(),
            _ => kept.of(&Kind::File),
        }?;
        check_access(file, Access::Read)?;
        file.try_clone()
    })
}

/// Like [`file()`], for a socket that clients connect to.
///
/// # Errors
/// The descriptor is of another kind, or another part of the VM already uses the socket.
pub fn listener(path: &Path) -> Option<io::Result<InheritedListener>> {
    with_kept(path, |kept| {
        if kept.in_use.strong_count() > 0 {
            return Err(io::Error::other(
                "another option of this VM already uses this descriptor: give each option its own descriptor",
            ));
        }
        let listener = kept.of(&Kind::Listener)?.try_clone().map(OwnedFd::from)?.into();
        let in_use = Arc::new(());
        kept.in_use = Arc::downgrade(&in_use);
        Ok(InheritedListener { listener, in_use })
    })
}

/// Like [`file()`], for a socket that is connected to a server. Returns the socket only once, because the server cannot start the protocol
/// again on the same connection.
///
/// # Errors
/// The descriptor is of another kind, or an earlier call returned the socket.
pub(crate) fn connection(path: &Path) -> Option<io::Result<UnixStream>> {
    with_kept(path, |kept| {
        kept.of(&Kind::Connection)?;
        kept.file.take().map(|file| OwnedFd::from(file).into()).ok_or_else(spent)
    })
}

/// Returns a duplicate of the kept descriptor with this number, which must refer to a tap interface.
///
/// # Errors
/// The descriptor is of another kind, or was not kept.
pub fn interface(number: i32) -> io::Result<OwnedFd> {
    let mut kept = lock(&KEPT);
    let kept = kept.iter_mut().find(|kept| kept.number == number);
    let kept = kept.ok_or_else(|| {
        io::Error::other("the program was not started with this descriptor: start carom with the descriptor open")
    })?;
    kept.of(&Kind::Interface)?.try_clone().map(OwnedFd::from)
}

/// Calls `what` with the kept descriptor that `path` names, if there is one.
fn with_kept<T>(path: &Path, what: impl FnOnce(&mut Kept) -> T) -> Option<T> {
    let number = ["/dev/fd", "/proc/self/fd"].iter().find_map(|directory| path.strip_prefix(directory).ok());
    let number = number.and_then(Path::to_str).and_then(|number| number.parse::<i32>().ok())?;
    lock(&KEPT).iter_mut().find(|kept| kept.number == number).map(what)
}

impl Kept {
    fn get(&self) -> io::Result<&File> {
        self.file.as_ref().ok_or_else(spent)
    }

    /// Returns the file, which must be of `kind`.
    fn of(&self, kind: &Kind) -> io::Result<&File> {
        if self.kind != *kind {
            return Err(io::Error::other(format!("the descriptor refers to {}, not to {kind}", self.kind)));
        }
        self.get()
    }
}

/// Returns the error for a descriptor that was handed over to its only user. Only connections stay in the list after they were handed over,
/// so the error is about a connection.
fn spent() -> io::Error {
    io::Error::other(
        "the connection of this descriptor was already used, and serves only one device for one boot; start carom with a new connection",
    )
}

fn check_access(file: &File, access: Access) -> io::Result<()> {
    let flags = fcntl_getfl(file)?;
    let refuse = |rule: &str| Err(io::Error::new(io::ErrorKind::PermissionDenied, rule));
    match (flags & OFlags::ACCMODE, access) {
        (OFlags::WRONLY, Access::Read | Access::ReadWrite) => {
            refuse("the descriptor is open for writing only: open it for reading too")
        }
        (OFlags::RDONLY, Access::ReadWrite | Access::Append) => {
            refuse("the descriptor is open for reading only: open it for writing too")
        }
        (_, Access::ReadWrite) if flags.contains(OFlags::APPEND) => {
            refuse("the descriptor is open for appending only: open it without O_APPEND")
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;

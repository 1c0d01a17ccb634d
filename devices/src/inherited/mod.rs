// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Descriptors that the process was started with, used in place of what it would open, make or connect to: KVM, IOMMUFD, devices of
//! VFIO, tap interfaces, and files and sockets that a path `/dev/fd/N` names.
//!
//! What a device's descriptor is of the kernel says by its number (`st_rdev`) and sysfs, whatever file it was opened by.

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
    /// Absent once it was given away for good.
    file: Option<File>,
    kind: Kind,
    /// Alive while somebody has what only one may have at a time.
    in_use: Weak<()>,
}

static KEPT: Mutex<Vec<Kept>> = Mutex::new(Vec::new());

/// What is to be done with a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// It is read.
    Read,
    /// It is read and written, anywhere in it.
    ReadWrite,
    /// It is written, from where it stands or to its end.
    Append,
}

/// A socket whose clients one part of the VM serves at a time.
#[derive(Debug)]
pub struct InheritedListener {
    /// The socket.
    pub listener: UnixListener,
    /// While it is there nobody else is given the socket.
    pub in_use: Arc<()>,
}

/// Keeps `fd`, which had this `number` when the process was started, for whoever needs what it is of.
///
/// # Errors
/// It is of nothing that is used here, or of a kind that can only be opened by its path.
pub fn keep(number: i32, fd: OwnedFd) -> io::Result<()> {
    let file = File::from(fd);
    let kind = identify(&file)?;
    let mut kept = lock(&KEPT);
    if kind.is_one_of_a_kind() && kept.iter().any(|other| other.kind == kind) {
        return Err(io::Error::other("another descriptor is of the same"));
    }
    // What had the number before may have been given away, and closed.
    kept.retain(|other| other.number != number || other.file.is_some());
    kept.push(Kept { number, file: Some(file), kind, in_use: Weak::new() });
    Ok(())
}

/// Another descriptor of the first that is of `kind`.
fn another(kind: &Kind) -> Option<io::Result<OwnedFd>> {
    let kept = lock(&KEPT);
    let file = kept.iter().find(|kept| kept.kind == *kind)?.file.as_ref()?;
    Some(fcntl_dupfd_cloexec(file.as_fd(), 3).map_err(io::Error::from))
}

/// A descriptor of KVM, if one was kept.
pub fn kvm() -> Option<io::Result<OwnedFd>> {
    another(&Kind::Kvm)
}

/// A descriptor of IOMMUFD, if one was kept.
pub(crate) fn iommufd() -> Option<io::Result<File>> {
    another(&Kind::Iommufd).map(|fd| fd.map(File::from))
}

/// The descriptor of VFIO's character device of the function in this directory of sysfs, without symbolic links, if one was kept. It is
/// given out once: the kernel binds it to an IOMMUFD until it is closed.
pub(crate) fn vfio_device(function: &Path) -> Option<File> {
    let mut kept = lock(&KEPT);
    let place = kept.iter().position(|kept| matches!(&kept.kind, Kind::VfioDevice(of) if of == function))?;
    kept.swap_remove(place).file
}

/// Whether `path` is `/dev/fd/N` or `/proc/self/fd/N` of a descriptor that was kept with the number N.
pub fn is_kept(path: &Path) -> bool {
    with_kept(path, |_| ()).is_some()
}

/// Another descriptor of the file or block device that was kept with the number N, if `path` is `/dev/fd/N` or `/proc/self/fd/N`. It is
/// the same open file: nobody asks for rights to it, and it stands where it stood. What is appended to may be a pipe too.
///
/// # Errors
/// It is of something else, or not open for this.
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

/// The same of a source of random bytes, or of a file or pipe that they are read from.
///
/// # Errors
/// It is of something else, or not open to be read.
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

/// The same of a socket that clients connect to.
///
/// # Errors
/// It is of something else, or has its clients served already.
pub fn listener(path: &Path) -> Option<io::Result<InheritedListener>> {
    with_kept(path, |kept| {
        if kept.in_use.strong_count() > 0 {
            return Err(io::Error::other("the clients of this descriptor are served by another part of the VM"));
        }
        let listener = kept.of(&Kind::Listener)?.try_clone().map(OwnedFd::from)?.into();
        let in_use = Arc::new(());
        kept.in_use = Arc::downgrade(&in_use);
        Ok(InheritedListener { listener, in_use })
    })
}

/// The same of a socket that a server is at the other end of. It is given out once: what was said on it cannot be said anew.
///
/// # Errors
/// It is of something else, or was given out.
pub(crate) fn connection(path: &Path) -> Option<io::Result<UnixStream>> {
    with_kept(path, |kept| {
        kept.of(&Kind::Connection)?;
        kept.file.take().map(|file| OwnedFd::from(file).into()).ok_or_else(spent)
    })
}

/// Another descriptor of the tap interface that was kept with this number.
///
/// # Errors
/// It is of something else, or none was kept.
pub fn interface(number: i32) -> io::Result<OwnedFd> {
    let mut kept = lock(&KEPT);
    let kept = kept.iter_mut().find(|kept| kept.number == number);
    let kept = kept.ok_or_else(|| io::Error::other("the program was not started with this descriptor"))?;
    kept.of(&Kind::Interface)?.try_clone().map(OwnedFd::from)
}

/// What `what` makes of what `path` names, if that was kept.
fn with_kept<T>(path: &Path, what: impl FnOnce(&mut Kept) -> T) -> Option<T> {
    let number = ["/dev/fd", "/proc/self/fd"].iter().find_map(|directory| path.strip_prefix(directory).ok());
    let number = number.and_then(Path::to_str).and_then(|number| number.parse::<i32>().ok())?;
    lock(&KEPT).iter_mut().find(|kept| kept.number == number).map(what)
}

impl Kept {
    fn get(&self) -> io::Result<&File> {
        self.file.as_ref().ok_or_else(spent)
    }

    /// The file, which is to be of `kind`.
    fn of(&self, kind: &Kind) -> io::Result<&File> {
        if self.kind != *kind {
            return Err(io::Error::other(format!("the descriptor is of {}, not of {kind}", self.kind)));
        }
        self.get()
    }
}

/// Only connections are given away.
fn spent() -> io::Error {
    io::Error::other("the connection of this descriptor was used up: it serves one boot of one device")
}

fn check_access(file: &File, access: Access) -> io::Result<()> {
    let flags = fcntl_getfl(file)?;
    let refuse = |rule: &str| Err(io::Error::new(io::ErrorKind::PermissionDenied, rule));
    match (flags & OFlags::ACCMODE, access) {
        (OFlags::WRONLY, Access::Read | Access::ReadWrite) => refuse("the descriptor is open to be written only"),
        (OFlags::RDONLY, Access::ReadWrite | Access::Append) => refuse("the descriptor is open to be read only"),
        (_, Access::ReadWrite) if flags.contains(OFlags::APPEND) => {
            refuse("the descriptor is open to be added to only (O_APPEND)")
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests;

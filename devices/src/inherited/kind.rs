// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Kinds of inherited descriptors.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{major, minor};
use rustix::io::Errno;
use rustix::net::sockopt::{socket_acceptconn, socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType, getpeername};

/// Device numbers of KVM, tap interfaces and the host's random number generator. The major number is `MISC_MAJOR` of
/// `include/uapi/linux/major.h`. The minor numbers are in `include/linux/miscdevice.h` and `drivers/char/hw_random/core.c`.
const KVM: (u32, u32) = (10, 232);
const TUN: (u32, u32) = (10, 200);
const HWRNG: (u32, u32) = (10, 183);
/// `/dev/random` and `/dev/urandom` (`drivers/char/mem.c`).
const RANDOM: [(u32, u32); 2] = [(1, 8), (1, 9)];

/// Kind of an inherited descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Kvm,
    Iommufd,
    /// VFIO's character device for the function in this directory of sysfs.
    VfioDevice(PathBuf),
    /// A file or a block device.
    File,
    /// A pipe.
    Pipe,
    /// A source of random bytes.
    Random,
    /// A tap or a macvtap interface.
    Interface,
    /// Listening unix stream socket, with or without a path.
    Listener,
    /// Unix stream socket that is connected to a server.
    Connection,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kvm => "/dev/kvm",
            Self::Iommufd => "/dev/iommu",
            Self::VfioDevice(_) => "a VFIO device",
            Self::File => "a file or a block device",
            Self::Pipe => "a pipe",
            Self::Random => "a source of random bytes",
            Self::Interface => "a tap interface",
            Self::Listener => "a listening unix socket",
            Self::Connection => "a connected unix socket",
        })
    }
}

impl Kind {
    /// True if a second descriptor of the same device would be useless.
    pub(super) fn is_one_of_a_kind(&self) -> bool {
        matches!(self, Self::Kvm | Self::Iommufd | Self::VfioDevice(_))
    }
}

/// Determines the kind of `file`.
///
/// # Errors
/// The file is of a kind that Carom does not use.
pub(super) fn identify(file: &File) -> io::Result<Kind> {
    let metadata = file.metadata()?;
    let kind = metadata.file_type();
    if kind.is_file() || kind.is_block_device() {
        return Ok(Kind::File);
    }
    if kind.is_fifo() {
        return Ok(Kind::Pipe);
    }
    if kind.is_socket() {
        return of_socket(file);
    }
    if !kind.is_char_device() {
        let rule = "is neither a file, a block device, a pipe, a unix socket, a tap interface, a source of random bytes, \
                    /dev/kvm, /dev/iommu nor a VFIO device";
        return Err(io::Error::other(rule));
    }
    let device = (major(metadata.rdev()), minor(metadata.rdev()));
    match device {
        KVM => Ok(Kind::Kvm),
        TUN => Ok(Kind::Interface),
        HWRNG => Ok(Kind::Random),
        _ if RANDOM.contains(&device) => Ok(Kind::Random),
        (major, minor) => of_directory(&fs::canonicalize(format!("/sys/dev/char/{major}:{minor}")).unwrap_or_default()),
    }
}

/// Determines the kind of a socket: a listening socket, or a socket that is connected to a server.
fn of_socket(file: &File) -> io::Result<Kind> {
    let fd = file.as_fd();
    if socket_domain(fd)? != AddressFamily::UNIX || socket_type(fd)? != SocketType::STREAM {
        return Err(io::Error::other("is a socket, but not a unix stream socket"));
    }
    if socket_acceptconn(fd)? {
        return Ok(Kind::Listener);
    }
    match getpeername(fd) {
        Ok(_) => Ok(Kind::Connection),
        Err(Errno::NOTCONN) => Err(io::Error::other("is a unix socket that neither listens nor is connected")),
        Err(error) => Err(error.into()),
    }
}

/// Determines the kind of a character device from its directory in sysfs.
fn of_directory(directory: &Path) -> io::Result<Kind> {
    let within = directory.parent().and_then(Path::file_name).unwrap_or_default();
    let name = directory.file_name().unwrap_or_default();
    match (within.to_str(), name.to_str()) {
        (Some("misc"), Some("iommu")) => Ok(Kind::Iommufd),
        (Some("vfio-dev"), _) => {
            let function = directory.parent().and_then(Path::parent).unwrap_or(directory);
            Ok(Kind::VfioDevice(function.to_path_buf()))
        }
        // Class of macvtap interfaces in sysfs (`drivers/net/macvtap.c`).
        (Some("macvtap"), _) => Ok(Kind::Interface),
        (Some("misc" | "vfio"), _) if within == "vfio" || name == "vfio" => {
            let rule = "is a VFIO group or container, which can only be opened by its path; \
                        pass /dev/iommu and /dev/vfio/devices/vfioN instead, with --platform iommufd=on";
            Err(io::Error::other(rule))
        }
        _ => Err(io::Error::other(
            "is neither /dev/kvm, /dev/iommu, a VFIO device (/dev/vfio/devices/vfioN), a tap interface nor a source of random bytes",
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};

    use rustix::net::{SocketFlags, socket_with};

    use super::*;

    #[test]
    fn sockets_are_identified_by_their_state() {
        let kind = |fd: OwnedFd| identify(&File::from(fd)).map_err(|error| error.to_string());
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(kind(UnixListener::bind(dir.path().join("s")).unwrap().into()), Ok(Kind::Listener));
        let (one, _other) = UnixStream::pair().unwrap();
        assert_eq!(kind(one.into()), Ok(Kind::Connection));
        let fresh = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        assert_eq!(kind(fresh).unwrap_err(), "is a unix socket that neither listens nor is connected");
        let no_stream = "is a socket, but not a unix stream socket";
        assert_eq!(kind(UnixDatagram::unbound().unwrap().into()).unwrap_err(), no_stream);
        assert_eq!(kind(std::net::TcpListener::bind("127.0.0.1:0").unwrap().into()).unwrap_err(), no_stream);
    }

    #[test]
    fn files_are_identified_by_type_and_device_number() {
        let kind = |fd: OwnedFd| identify(&File::from(fd)).map_err(|error| error.to_string());
        let open = |path: &str| File::open(path).unwrap().into();
        let (reader, _writer) = io::pipe().unwrap();
        assert_eq!(kind(reader.into()), Ok(Kind::Pipe));
        assert_eq!(kind(open("/dev/urandom")), Ok(Kind::Random));
        assert_eq!(kind(tempfile::tempfile().unwrap().into()), Ok(Kind::File));
        assert!(kind(open("/")).unwrap_err().starts_with("is neither a file, a block device"));
        assert!(kind(open("/dev/null")).unwrap_err().starts_with("is neither /dev/kvm"));
    }

    #[test]
    fn devices_are_known_by_their_directory_in_sysfs() {
        let kind = |path: &str| of_directory(Path::new(path)).map_err(|error| error.to_string());
        assert_eq!(kind("/sys/devices/virtual/misc/iommu"), Ok(Kind::Iommufd));
        let function = "/sys/devices/pci0000:00/0000:00:05.0";
        assert_eq!(kind(&format!("{function}/vfio-dev/vfio0")), Ok(Kind::VfioDevice(function.into())));
        assert_eq!(kind("/sys/devices/virtual/net/macvtap0/macvtap/tap5"), Ok(Kind::Interface));
        for group in ["/sys/devices/virtual/vfio/4", "/sys/devices/virtual/misc/vfio"] {
            assert!(kind(group).unwrap_err().starts_with("is a VFIO group or container"), "{group}");
        }
        for other in ["/sys/devices/virtual/misc/tun2", "/sys/devices/virtual/mem/null", ""] {
            assert!(kind(other).unwrap_err().starts_with("is neither /dev/kvm"), "{other}");
        }
    }
}

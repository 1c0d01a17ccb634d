// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Descriptors that the process was started with, used in place of files that it would open: KVM, IOMMUFD, devices of VFIO, and files
//! that a path `/dev/fd/N` names.
//!
//! What a device's descriptor is of the kernel says by its number (`st_rdev`) and sysfs, whatever file it was opened by.

use std::fs;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use rustix::fs::{OFlags, fcntl_getfl, major, minor};
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};

use crate::sync::lock;

/// `MISC_MAJOR` and `KVM_MINOR` of `include/uapi/linux/major.h` and `include/linux/miscdevice.h`.
const KVM: (u32, u32) = (10, 232);

/// What a descriptor is of.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Kvm,
    Iommufd,
    /// The character device that VFIO has for the function in this directory of sysfs.
    VfioDevice(PathBuf),
    /// A file or a block device.
    File,
}

struct Kept {
    number: i32,
    file: File,
    kind: Kind,
}

static KEPT: Mutex<Vec<Kept>> = Mutex::new(Vec::new());

/// Keeps `fd`, which had this `number` when the process was started, for whoever needs what it is of.
///
/// # Errors
/// It is of nothing that is used here, or of a kind that can only be opened by its path.
pub fn keep(number: i32, fd: OwnedFd) -> io::Result<()> {
    let file = File::from(fd);
    let kind = identify(&file)?;
    fcntl_setfd(&file, FdFlags::CLOEXEC)?;
    let mut kept = lock(&KEPT);
    if kind != Kind::File && kept.iter().any(|other| other.kind == kind) {
        return Err(io::Error::other("another descriptor is of the same"));
    }
    kept.push(Kept { number, file, kind });
    Ok(())
}

fn identify(file: &File) -> io::Result<Kind> {
    let metadata = file.metadata()?;
    let kind = metadata.file_type();
    if kind.is_file() || kind.is_block_device() {
        return Ok(Kind::File);
    }
    let device = (major(metadata.rdev()), minor(metadata.rdev()));
    if !kind.is_char_device() {
        return Err(io::Error::other("is neither a file, a block device, /dev/kvm, /dev/iommu nor a device of VFIO's"));
    }
    if device == KVM {
        return Ok(Kind::Kvm);
    }
    let directory = fs::canonicalize(format!("/sys/dev/char/{}:{}", device.0, device.1)).unwrap_or_default();
    of_directory(&directory)
}

/// What the character device with this directory in sysfs is.
fn of_directory(directory: &Path) -> io::Result<Kind> {
    let within = directory.parent().and_then(Path::file_name).unwrap_or_default();
    let name = directory.file_name().unwrap_or_default();
    match (within.to_str(), name.to_str()) {
        (Some("misc"), Some("iommu")) => Ok(Kind::Iommufd),
        (Some("vfio-dev"), _) => {
            let function = directory.parent().and_then(Path::parent).unwrap_or(directory);
            Ok(Kind::VfioDevice(function.to_path_buf()))
        }
        (Some("misc" | "vfio"), _) if within == "vfio" || name == "vfio" => {
            let rule = "is a group or a container of VFIO's, which are opened by their path only; \
                        pass /dev/iommu and /dev/vfio/devices/vfioN, with --platform iommufd=on";
            Err(io::Error::other(rule))
        }
        _ => Err(io::Error::other("is neither /dev/kvm, /dev/iommu nor a device of VFIO's (/dev/vfio/devices/vfioN)")),
    }
}

/// Another descriptor of the first that is of `kind`.
fn another(kind: &Kind) -> Option<io::Result<OwnedFd>> {
    let kept = lock(&KEPT);
    kept.iter().find(|kept| kept.kind == *kind).map(|kept| Ok(fcntl_dupfd_cloexec(kept.file.as_fd(), 3)?))
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
    Some(kept.swap_remove(place).file)
}

/// Another descriptor of the file or block device that was kept with the number N, if `path` is `/dev/fd/N` or `/proc/self/fd/N`. It is
/// the same open file: nobody asks for rights to it.
///
/// # Errors
/// It is not open to be read, to be written if `write`, or only to be added to.
pub(crate) fn file(path: &Path, write: bool) -> Option<io::Result<File>> {
    let number = ["/dev/fd", "/proc/self/fd"].iter().find_map(|directory| path.strip_prefix(directory).ok());
    let number = number.and_then(Path::to_str).and_then(|number| number.parse::<i32>().ok())?;
    let kept = lock(&KEPT);
    let kept = kept.iter().find(|kept| kept.number == number && kept.kind == Kind::File)?;
    Some(check_access(&kept.file, write).and_then(|()| kept.file.try_clone()))
}

fn check_access(file: &File, write: bool) -> io::Result<()> {
    let flags = fcntl_getfl(file)?;
    let refuse = |rule: &str| Err(io::Error::new(io::ErrorKind::PermissionDenied, rule));
    match flags & OFlags::ACCMODE {
        OFlags::WRONLY => refuse("the descriptor is open to be written only"),
        OFlags::RDONLY if write => refuse("the descriptor is open to be read only"),
        _ if flags.contains(OFlags::APPEND) => refuse("the descriptor is open to be added to only (O_APPEND)"),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::FileExt;

    use super::*;

    fn keep_file(file: File) -> PathBuf {
        let number = file.as_raw_fd();
        keep(number, file.into()).unwrap();
        PathBuf::from(format!("/dev/fd/{number}"))
    }

    #[test]
    fn file_that_is_kept_is_had_by_either_path_without_rights_to_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        fs::write(&path, b"text").unwrap();
        let kept = keep_file(File::options().read(true).write(true).open(&path).unwrap());
        fs::remove_file(&path).unwrap();
        let had = file(&kept, true).unwrap().unwrap();
        had.write_all_at(b"n", 0).unwrap();
        let other = PathBuf::from("/proc/self/fd").join(kept.file_name().unwrap());
        let mut bytes = [0; 4];
        file(&other, false).unwrap().unwrap().read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(&bytes, b"next");
        for none in ["/dev/fd/", "/dev/fd/x", "/dev/fd/9999", "/dev/fd/-1", "/dev/shm/3"] {
            assert!(file(Path::new(none), false).is_none(), "{none}");
        }
    }

    #[test]
    fn file_that_is_open_for_less_is_refused() {
        let file_of = |options: &mut fs::OpenOptions| {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("disk");
            fs::write(&path, b"").unwrap();
            keep_file(options.open(path).unwrap())
        };
        let refused = |path: &Path, write| file(path, write).unwrap().unwrap_err().to_string();
        let reading = file_of(File::options().read(true));
        assert_eq!(refused(&reading, true), "the descriptor is open to be read only");
        assert!(file(&reading, false).unwrap().is_ok());
        let writing = file_of(File::options().write(true));
        assert_eq!(refused(&writing, false), "the descriptor is open to be written only");
        let adding = file_of(File::options().read(true).append(true));
        assert_eq!(refused(&adding, true), "the descriptor is open to be added to only (O_APPEND)");
    }

    #[test]
    fn what_is_of_no_use_is_refused() {
        let refused = |fd: OwnedFd| keep(fd.as_raw_fd(), fd).unwrap_err().to_string();
        let (reader, _writer) = io::pipe().unwrap();
        assert!(refused(reader.into()).starts_with("is neither a file, a block device"));
        assert!(refused(File::open("/dev/null").unwrap().into()).starts_with("is neither /dev/kvm"));
    }

    #[test]
    fn devices_are_known_by_their_directory_in_sysfs() {
        let kind = |path: &str| of_directory(Path::new(path)).map_err(|error| error.to_string());
        assert_eq!(kind("/sys/devices/virtual/misc/iommu"), Ok(Kind::Iommufd));
        let function = "/sys/devices/pci0000:00/0000:00:05.0";
        assert_eq!(kind(&format!("{function}/vfio-dev/vfio0")), Ok(Kind::VfioDevice(function.into())));
        for group in ["/sys/devices/virtual/vfio/4", "/sys/devices/virtual/misc/vfio"] {
            assert!(kind(group).unwrap_err().starts_with("is a group or a container"), "{group}");
        }
        for other in ["/sys/devices/virtual/misc/tun", "/sys/devices/virtual/mem/null", ""] {
            assert!(kind(other).unwrap_err().starts_with("is neither /dev/kvm"), "{other}");
        }
    }

    #[test]
    fn device_is_given_out_once() {
        let function = PathBuf::from("/sys/devices/pci0000:00/0000:00:1f.7");
        let device =
            Kept { number: 1 << 20, file: File::open("/dev/null").unwrap(), kind: Kind::VfioDevice(function.clone()) };
        lock(&KEPT).push(device);
        assert!(vfio_device(Path::new("/sys/devices/pci0000:00/0000:00:1e.7")).is_none());
        assert!(vfio_device(&function).is_some());
        assert!(vfio_device(&function).is_none());
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Opens, attaches and closes a VFIO device, and handles failures of these steps.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;

use log::{error, warn};
use vfio_ioctls::{VfioDevice, VfioError};

use super::sysfs::HostFunctionPath;
use crate::inherited;
use crate::platform::VfioFiles;
use crate::vfio::error::{VfioPciError, file_error};
use crate::vfio::space::{Attachable, DmaSpace};

/// Open VFIO device.
pub(super) struct OpenDevice {
    name: String,
    /// `Some` until the `OpenDevice` is dropped.
    device: Option<VfioDevice>,
    /// Registration of the device's file with KVM. The registration is dropped after the device. Until then, KVM keeps the file open.
    _listed: Option<ListedFile>,
}

impl OpenDevice {
    pub(super) fn open(function: &HostFunctionPath, space: &DmaSpace) -> Result<Self, VfioPciError> {
        let failed = |error| open_error(function, error);
        let mut listed = None;
        let device = match space {
            DmaSpace::Container(container) => VfioDevice::new(function.path(), container.clone(), true),
            DmaSpace::Ioas { ioas, kvm } => {
                let inherited = inherited::vfio_device(function.path());
                let file = inherited.map_or_else(|| VfioDevice::open_cdev(function.path()), Ok).map_err(failed)?;
                if let Some(kvm) = kvm {
                    let what = || format!("cannot register {} with KVM", function.name());
                    let held = ListedFile::new(&file, kvm.clone());
                    listed = Some(held.map_err(|source| VfioPciError::Host { what: what(), source })?);
                }
                VfioDevice::new_from_fd(file, ioas.clone(), true)
            }
        };
        Ok(Self { name: function.name().to_string(), device: Some(device.map_err(failed)?), _listed: listed })
    }
}

impl Deref for OpenDevice {
    type Target = VfioDevice;

    fn deref(&self) -> &VfioDevice {
        self.device.as_ref().expect("the device exists until `OpenDevice` is dropped")
    }
}

impl Drop for OpenDevice {
    fn drop(&mut self) {
        let device = self.device.take();
        // `vfio-ioctls` panics if the kernel does not detach the device. The crate also panics if the device is missing in sysfs, and the
        // host may remove the device at any time. After a panic, `vfio-ioctls` may leave resources open. The kernel closes these resources
        // with the container, or when this process ends.
        if catch_unwind(AssertUnwindSafe(|| drop(device))).is_err() {
            error!(
                "{}: cannot close the device completely, for example because the host has removed the device",
                self.name
            );
        }
    }
}

impl Attachable for OpenDevice {
    fn attach(&self, space: &DmaSpace) -> io::Result<()> {
        let DmaSpace::Ioas { ioas, .. } = space else { return Err(io::ErrorKind::Unsupported.into()) };
        self.attach_hwpt(ioas.ioas().id()).map_err(|error| match error {
            VfioError::VfioDeviceAttachIommufdPt(errno) => errno.into(),
            error => io::Error::other(error),
        })
    }
}

/// File that is registered with KVM until the value is dropped. KVM keeps a registered file open. If the file were not removed from KVM's
/// list, the device would stay busy until the VM ends.
struct ListedFile {
    /// Duplicate of the file's descriptor.
    file: File,
    kvm: Arc<dyn VfioFiles>,
}

impl ListedFile {
    fn new(file: &File, kvm: Arc<dyn VfioFiles>) -> io::Result<Self> {
        let file = file.try_clone()?;
        kvm.add(file.as_fd())?;
        Ok(Self { file, kvm })
    }
}

impl Drop for ListedFile {
    fn drop(&mut self) {
        if let Err(error) = self.kvm.remove(self.file.as_fd()) {
            warn!("cannot remove a VFIO device from KVM, so the device stays busy until the VM ends: {error}");
        }
    }
}

fn open_error(function: &HostFunctionPath, error: VfioError) -> VfioPciError {
    let (name, group) = (function.name().to_string(), function.group());
    let busy = || VfioPciError::Busy { name: name.clone(), group };
    match error {
        VfioError::OpenGroup(source, _) if source.raw_os_error() == Some(libc::EBUSY) => busy(),
        VfioError::OpenGroup(source, _) => {
            file_error(PathBuf::from_iter([OsStr::new("/dev/vfio"), OsStr::new(&group.to_string())]), source)
        }
        VfioError::GroupGetDeviceFD(errno) if errno.errno() == libc::EBUSY => busy(),
        VfioError::InvalidVfioDev => VfioPciError::NoCdev { name },
        VfioError::OpenDeviceCdev(source) => {
            file_error(function.cdev().unwrap_or_else(|| PathBuf::from("/dev/vfio/devices")), source)
        }
        // All devices of a group must share one address space, but another device of the group uses a different address space.
        VfioError::VfioDeviceAttachIommufdPt(errno) if errno.errno() == libc::EINVAL => busy(),
        VfioError::VfioDeviceBindIommufd(errno) => match errno.errno() {
            // Another user has opened the group (EBUSY) or the character device (EINVAL).
            libc::EBUSY | libc::EINVAL => busy(),
            // Another process owns a device of the group, or interrupt remapping is off on the host.
            libc::EPERM if function.in_the_way().is_empty() => VfioPciError::NotOurs { name, group },
            libc::EPERM => VfioPciError::NotViable { name, group, others: function.in_the_way() },
            _ => VfioPciError::Vfio { what: format!("cannot open {name}"), source: error },
        },
        // `HostFunctionPath::inspect` found no host driver in the group, so a host driver was bound to a function of the group afterwards.
        VfioError::GroupViable => VfioPciError::NotViable { name, group, others: function.in_the_way() },
        source => VfioPciError::Vfio { what: format!("cannot open {name}"), source },
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::BorrowedFd;
    use std::sync::Mutex;

    use super::*;

    /// Counts the files that were added to KVM and removed from it.
    #[derive(Default)]
    struct FakeKvm {
        files: Mutex<(u32, u32)>,
        refuses: bool,
    }

    impl VfioFiles for FakeKvm {
        fn add(&self, _: BorrowedFd<'_>) -> io::Result<()> {
            if self.refuses {
                return Err(io::Error::from_raw_os_error(libc::ENOMEM));
            }
            self.files.lock().unwrap().0 += 1;
            Ok(())
        }
        fn remove(&self, _: BorrowedFd<'_>) -> io::Result<()> {
            self.files.lock().unwrap().1 += 1;
            Ok(())
        }
    }

    #[test]
    fn vfio_file_is_removed_from_kvm_only_if_kvm_accepted_it() {
        let file = tempfile::tempfile().unwrap();
        let kvm = Arc::new(FakeKvm::default());
        drop(ListedFile::new(&file, kvm.clone()).unwrap());
        assert_eq!(*kvm.files.lock().unwrap(), (1, 1));
        let kvm = Arc::new(FakeKvm { refuses: true, ..FakeKvm::default() });
        assert!(ListedFile::new(&file, kvm.clone()).is_err());
        assert_eq!(*kvm.files.lock().unwrap(), (0, 0));
    }
}

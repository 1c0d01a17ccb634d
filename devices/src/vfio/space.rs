// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The host's I/O address spaces: containers of VFIO's type 1 back end, or IOASes of IOMMUFD.

use std::any::Any;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use iommu_bounce::{EndpointId, MapperLimits, Permissions};
use iommufd_ioctls::{IommuFd, IommufdError};
use vfio_ioctls::{VfioContainer, VfioDeviceFd, VfioError, VfioIommufd, VfioOps};
use vm_memory::VolatileSlice;

use super::device::VfioPciDevice;
use super::error::VfioPciError;
use super::mapper::VfioMapper;
use super::residents::Residents;
use super::{ioas, ioctl, iommu_info};

/// The way to the host's IOMMU, which makes address spaces.
pub struct HostIommu {
    way: Way,
    /// KVM's own VFIO device, which learns what devices the VM uses.
    kvm_vfio: Option<Arc<VfioDeviceFd>>,
}

enum Way {
    Containers,
    Iommufd(Arc<IommuFd>, Residents),
}

impl HostIommu {
    /// By VFIO's groups and containers (`/dev/vfio/vfio`), which every host has.
    pub fn containers(kvm_vfio: Option<Arc<VfioDeviceFd>>) -> Self {
        Self { way: Way::Containers, kvm_vfio }
    }

    /// By IOMMUFD (`/dev/iommu`) and VFIO's character devices: Linux 6.6 built with `CONFIG_IOMMUFD` and
    /// `CONFIG_VFIO_DEVICE_CDEV`.
    pub fn iommufd(kvm_vfio: Option<Arc<VfioDeviceFd>>) -> Result<Self, VfioPciError> {
        let iommufd = IommuFd::new().map_err(|error| match error {
            IommufdError::OpenIommufd(source) => iommufd_error(source),
            error => VfioPciError::Host { what: "opening /dev/iommu".to_string(), source: ioas::io_error(error) },
        })?;
        Ok(Self { way: Way::Iommufd(Arc::new(iommufd), Residents::default()), kvm_vfio })
    }

    /// Makes an empty address space.
    pub fn new_space(&self) -> Result<DmaSpace, VfioPciError> {
        let kvm_vfio = self.kvm_vfio.clone();
        match &self.way {
            Way::Containers => {
                let container = VfioContainer::new(kvm_vfio).map_err(container_error)?;
                Ok(DmaSpace::Container(Arc::new(container)))
            }
            Way::Iommufd(iommufd, _) => {
                let ioas = VfioIommufd::new(iommufd.clone(), None, kvm_vfio).map_err(|source| VfioPciError::Vfio {
                    what: "making an address space (IOAS) of /dev/iommu".to_string(),
                    source,
                })?;
                Ok(DmaSpace::Ioas(Arc::new(ioas)))
            }
        }
    }

    /// The mapper of `endpoint`: for `space`, in which its device `function` is and no other. `memory` owns the guest RAM
    /// (and whatever else will be mapped) and is kept as long as the mapper. By IOMMUFD, the mappers of one `HostIommu`
    /// can take one another's endpoints in.
    pub fn mapper(
        &self,
        space: DmaSpace,
        endpoint: EndpointId,
        function: &VfioPciDevice,
        memory: impl Any + Send,
    ) -> Result<VfioMapper, VfioPciError> {
        let residents = match &self.way {
            Way::Containers => None,
            Way::Iommufd(_, residents) => {
                residents.insert(endpoint, function.movable());
                Some(residents.clone())
            }
        };
        VfioMapper::new(space, residents, memory)
    }
}

fn container_error(error: VfioError) -> VfioPciError {
    match error {
        VfioError::OpenContainer(source) => file_error(PathBuf::from("/dev/vfio/vfio"), source),
        VfioError::VfioExtension => VfioPciError::NoType1,
        source => VfioPciError::Vfio { what: "opening a VFIO container".to_string(), source },
    }
}

fn iommufd_error(source: io::Error) -> VfioPciError {
    match file_error(PathBuf::from("/dev/iommu"), source) {
        VfioPciError::NoVfio { .. } => VfioPciError::NoIommufd,
        error => error,
    }
}

/// Why a device file of VFIO could not be opened.
pub(super) fn file_error(path: PathBuf, source: io::Error) -> VfioPciError {
    match source.kind() {
        io::ErrorKind::NotFound => VfioPciError::NoVfio { path },
        io::ErrorKind::PermissionDenied => VfioPciError::NoAccess { path, source },
        // The file is there while the module behind it is not.
        _ if matches!(source.raw_os_error(), Some(libc::ENODEV | libc::ENXIO)) => VfioPciError::NoVfio { path },
        _ => VfioPciError::Host { what: format!("opening {}", path.display()), source },
    }
}

/// An I/O address space of the host: what the devices that are put in it can reach. Clones are the same one.
///
/// It starts empty. What is mapped stays mapped until it is unmapped, or the last clone and the last device are gone.
#[derive(Clone)]
pub enum DmaSpace {
    /// A container of VFIO's type 1 back end.
    Container(Arc<VfioContainer>),
    /// An I/O address space of IOMMUFD.
    Ioas(Arc<VfioIommufd>),
}

impl DmaSpace {
    /// What opens devices into this space.
    pub(super) fn opener(&self) -> Arc<dyn VfioOps> {
        match self {
            Self::Container(container) => container.clone(),
            Self::Ioas(ioas) => ioas.clone(),
        }
    }

    /// Lets the devices reach `memory` at `iova`, and pins it. The errors are the kernel's: `EEXIST` where something is
    /// mapped already, `ENOSPC` and `ENOMEM` for limits.
    pub(super) fn map(&self, iova: u64, memory: &VolatileSlice<'_>, permissions: Permissions) -> io::Result<()> {
        match self {
            Self::Container(container) => ioctl::map_dma(&**container, iova, memory, permissions),
            Self::Ioas(ioas) => ioas::map(ioas, iova, memory, permissions),
        }
    }

    /// Takes `[iova, iova + len)` away from the devices: whole mappings only. Returns how many bytes were mapped there.
    /// The error is `EINVAL` or `ENOENT` when the range cuts a mapping or holds none.
    pub(super) fn unmap(&self, iova: u64, len: u64) -> io::Result<u64> {
        match self {
            Self::Container(container) => ioctl::unmap_dma(&**container, iova, len),
            Self::Ioas(ioas) => ioas::unmap(ioas, iova, len),
        }
    }

    /// Takes everything away from the devices.
    pub(super) fn unmap_all(&self) -> io::Result<()> {
        match self {
            Self::Container(container) => match ioctl::unmap_all(&**container) {
                // The container's last device is closed and its address space gone.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
                outcome => outcome.map(drop),
            },
            Self::Ioas(ioas) => ioas::unmap_all(ioas),
        }
    }

    /// What the host's IOMMU can translate here. There must be a device in the space: it is not known before.
    pub(super) fn limits(&self) -> io::Result<MapperLimits> {
        match self {
            Self::Container(container) => Ok(iommu_info::parse(&ioctl::iommu_info(&**container)?)),
            Self::Ioas(ioas) => ioas::limits(ioas),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_iommufd_says_how_to_do_without() {
        for errno in [libc::ENOENT, libc::ENODEV, libc::ENXIO] {
            let error = iommufd_error(io::Error::from_raw_os_error(errno));
            assert!(error.is_user_error(), "{error}");
            assert!(error.to_string().contains("turn iommufd of the platform off"), "{error}");
        }
        let error = iommufd_error(io::Error::from_raw_os_error(libc::EACCES));
        assert!(error.to_string().starts_with("/dev/iommu: Permission denied"), "{error}");
    }
}

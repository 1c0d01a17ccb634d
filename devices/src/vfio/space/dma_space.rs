// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The host's I/O address spaces: containers of VFIO's type 1 back end, or IOASes of IOMMUFD.

use std::io;
use std::sync::Arc;

use iommu_bounce::{MapperLimits, Permissions};
use vfio_ioctls::{VfioContainer, VfioIommufd};
use vm_memory::VolatileSlice;

use super::{ioas, type1_info};
use crate::platform::VfioFiles;
use crate::vfio::ioctl;

/// Host I/O address space: the memory that the attached devices can access. Clones refer to the same address space.
///
/// A new address space is empty. A mapping lasts until it is unmapped, or until the last clone is dropped and the last device is closed.
#[derive(Clone)]
pub enum DmaSpace {
    /// A container of VFIO's type 1 back end.
    Container(Arc<VfioContainer>),
    /// An I/O address space of IOMMUFD.
    Ioas {
        /// Address space. A device is attached to this address space when the device is opened.
        ioas: Arc<VfioIommufd>,
        /// KVM's list of VFIO files. The devices' files are added to this list.
        kvm: Option<Arc<dyn VfioFiles>>,
    },
}

impl DmaSpace {
    /// Maps `memory` at `iova` for the devices, and pins the memory. Errors are those of the kernel. `EEXIST` means that the range overlaps
    /// a mapping. `ENOSPC` and `ENOMEM` mean that a limit is reached.
    pub(crate) fn map(&self, iova: u64, memory: &VolatileSlice<'_>, permissions: Permissions) -> io::Result<()> {
        match self {
            Self::Container(container) => ioctl::map_dma(&**container, iova, memory, permissions),
            Self::Ioas { ioas, .. } => ioas::map(ioas, iova, memory, permissions),
        }
    }

    /// Unmaps `[iova, iova + len)`, which must be whole mappings. Returns the number of bytes that were mapped in this range. Fails with
    /// `EINVAL` (container) or `ENOENT` (IOAS) if the range splits a mapping. If nothing is mapped in the range, a container returns 0, and
    /// an IOAS fails with `ENOENT`.
    pub(crate) fn unmap(&self, iova: u64, len: u64) -> io::Result<u64> {
        match self {
            Self::Container(container) => ioctl::unmap_dma(&**container, iova, len),
            Self::Ioas { ioas, .. } => ioas::unmap(ioas, iova, len),
        }
    }

    /// Unmaps everything.
    pub(crate) fn unmap_all(&self) -> io::Result<()> {
        match self {
            Self::Container(container) => match ioctl::unmap_all(&**container) {
                // The container's last device is closed, so the kernel's address space no longer exists.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
                outcome => outcome.map(drop),
            },
            Self::Ioas { ioas, .. } => ioas::unmap_all(ioas),
        }
    }

    /// Returns the limits of the host's IOMMU for this address space. A device must be attached, because the limits depend on the
    /// attached devices.
    pub(crate) fn limits(&self) -> io::Result<MapperLimits> {
        match self {
            Self::Container(container) => Ok(type1_info::parse(&ioctl::iommu_info(&**container)?)),
            Self::Ioas { ioas, .. } => ioas::limits(ioas),
        }
    }
}

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

/// An I/O address space of the host: what the devices attached to it can reach. Clones are the same one.
///
/// It starts empty. What is mapped stays mapped until it is unmapped, or the last clone and the last device are gone.
#[derive(Clone)]
pub enum DmaSpace {
    /// A container of VFIO's type 1 back end.
    Container(Arc<VfioContainer>),
    /// An I/O address space of IOMMUFD.
    Ioas {
        /// The address space, in which devices are opened.
        ioas: Arc<VfioIommufd>,
        /// KVM is told of the devices.
        kvm: Option<Arc<dyn VfioFiles>>,
    },
}

impl DmaSpace {
    /// Lets the devices reach `memory` at `iova`, and pins it. The errors are the kernel's: `EEXIST` where something is
    /// mapped already, `ENOSPC` and `ENOMEM` for limits.
    pub(crate) fn map(&self, iova: u64, memory: &VolatileSlice<'_>, permissions: Permissions) -> io::Result<()> {
        match self {
            Self::Container(container) => ioctl::map_dma(&**container, iova, memory, permissions),
            Self::Ioas { ioas, .. } => ioas::map(ioas, iova, memory, permissions),
        }
    }

    /// Unmaps `[iova, iova + len)`, which must be whole mappings. Returns how many bytes were mapped there.
    /// The error is `EINVAL` or `ENOENT` when the range cuts a mapping or holds none.
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
                // The container's last device is closed and its address space gone.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
                outcome => outcome.map(drop),
            },
            Self::Ioas { ioas, .. } => ioas::unmap_all(ioas),
        }
    }

    /// What the host's IOMMU can translate here. A device must be attached: the limits are not known before.
    pub(crate) fn limits(&self) -> io::Result<MapperLimits> {
        match self {
            Self::Container(container) => Ok(type1_info::parse(&ioctl::iommu_info(&**container)?)),
            Self::Ioas { ioas, .. } => ioas::limits(ioas),
        }
    }
}

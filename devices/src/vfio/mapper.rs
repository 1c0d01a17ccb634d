// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The I/O address space of an endpoint behind virtio-iommu: one VFIO container.

use std::any::Any;
use std::io;
use std::sync::Arc;

use iommu_bounce::{DmaMapper, MapError, MapperLimits, Permissions, UnmapError};
use log::{error, warn};
use vfio_ioctls::VfioContainer;
use vm_memory::VolatileSlice;

use super::error::VfioPciError;
use super::throttle::Throttle;
use super::{ioctl, iommu_info};

/// Maps for the devices of one VFIO container, with the permissions asked for and no more.
///
/// When it is dropped, the container's address space is emptied.
pub struct VfioMapper {
    container: Arc<VfioContainer>,
    limits: MapperLimits,
    /// What the mappings lead to outlives them: a slice's lifetime ends with the call that maps it.
    _memory: Box<dyn Any + Send>,
    throttle: Throttle,
}

impl VfioMapper {
    /// A mapper for `container`, which must have a device already: its IOMMU is not known before. `memory` owns the
    /// guest RAM (and whatever else will be mapped) and is kept as long as the mapper.
    pub fn new(container: Arc<VfioContainer>, memory: impl Any + Send) -> Result<Self, VfioPciError> {
        let info = ioctl::iommu_info(&*container).map_err(|source| VfioPciError::Host {
            what: "asking VFIO for the limits of the host's IOMMU".to_string(),
            source,
        })?;
        let limits = iommu_info::parse(&info);
        Ok(Self { container, limits, _memory: Box::new(memory), throttle: Throttle::default() })
    }

    fn map_error(&self, error: io::Error) -> MapError {
        let hint = match error.raw_os_error() {
            Some(libc::EEXIST) => return MapError::Exists,
            Some(libc::ENOSPC) => {
                "the container holds as many mappings as the host allows; raise dma_entry_limit of module vfio_iommu_type1"
            }
            Some(libc::ENOMEM) => {
                "no more memory can be pinned; raise the limit on locked memory (ulimit -l, LimitMEMLOCK=)"
            }
            _ => return MapError::Host(error),
        };
        if self.throttle.pass() {
            warn!("VFIO mapping refused: {hint}");
        }
        MapError::NoResources
    }
}

impl DmaMapper for VfioMapper {
    fn map(&mut self, iova: u64, memory: VolatileSlice<'_>, permissions: Permissions) -> Result<(), MapError> {
        ioctl::map_dma(&*self.container, iova, &memory, permissions).map_err(|error| self.map_error(error))
    }

    fn unmap(&mut self, iova: u64, len: u64) -> Result<(), UnmapError> {
        match ioctl::unmap_dma(&*self.container, iova, len) {
            Ok(done) if done == len => Ok(()),
            Ok(done) => {
                if self.throttle.pass() {
                    error!("VFIO unmapped {done:#x} bytes of {len:#x} at IOVA {iova:#x}");
                }
                Err(UnmapError::NotMapped)
            }
            // Type 1 version 2 refuses to cut a mapping and then changes nothing.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Err(UnmapError::NotMapped),
            Err(error) => Err(UnmapError::Host(error)),
        }
    }

    fn limits(&self) -> MapperLimits {
        self.limits.clone()
    }
}

impl Drop for VfioMapper {
    fn drop(&mut self) {
        // Before the memory goes. A container whose last device is closed already has no address space any more.
        if let Err(error) = ioctl::unmap_all(&*self.container)
            && error.raw_os_error() != Some(libc::EINVAL)
        {
            error!("emptying a VFIO container: {error}");
        }
    }
}

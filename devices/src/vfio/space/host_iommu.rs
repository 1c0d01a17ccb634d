// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Host IOMMU, which creates address spaces and their mappers.

use std::any::Any;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use iommu_bounce::EndpointId;
use iommufd_ioctls::{IommuFd, IommufdError};
use vfio_ioctls::{VfioContainer, VfioDeviceFd, VfioError, VfioIommufd};

use super::dma_space::DmaSpace;
use super::endpoint_devices::EndpointDevices;
use super::ioas;
use super::vfio_mapper::VfioMapper;
use crate::inherited;
use crate::platform::VfioFiles;
use crate::vfio::error::{VfioPciError, file_error};
use crate::vfio::function::VfioPciDevice;

/// Host IOMMU, which creates address spaces.
pub struct HostIommu {
    backend: Backend,
}

/// Each variant may have access to KVM's VFIO device, through which KVM learns which host devices the VM uses.
enum Backend {
    Containers(Option<Arc<VfioDeviceFd>>),
    Iommufd(Arc<IommuFd>, EndpointDevices, Option<Arc<dyn VfioFiles>>),
}

impl HostIommu {
    /// Creates a host IOMMU that uses VFIO's groups and containers (`/dev/vfio/vfio`). Every host with VFIO has groups and containers.
    pub fn containers(kvm_vfio: Option<Arc<VfioDeviceFd>>) -> Self {
        Self { backend: Backend::Containers(kvm_vfio) }
    }

    /// Creates a host IOMMU that uses IOMMUFD (`/dev/iommu`) and VFIO's character devices. The character devices need Linux 6.6 or later.
    /// The kernel must be built with `CONFIG_IOMMUFD` and `CONFIG_VFIO_DEVICE_CDEV`. If a descriptor of IOMMUFD was inherited, the host
    /// IOMMU uses it instead of opening `/dev/iommu`.
    pub fn iommufd(kvm: Option<Arc<dyn VfioFiles>>) -> Result<Self, VfioPciError> {
        let iommufd = match inherited::iommufd() {
            Some(file) => file.map(IommuFd::new_from_fd).map_err(iommufd_error)?,
            None => IommuFd::new().map_err(|error| match error {
                IommufdError::OpenIommufd(source) => iommufd_error(source),
                error => {
                    VfioPciError::Host { what: "cannot open /dev/iommu".to_string(), source: ioas::io_error(error) }
                }
            })?,
        };
        Ok(Self { backend: Backend::Iommufd(Arc::new(iommufd), EndpointDevices::default(), kvm) })
    }

    /// Creates an empty address space.
    pub fn new_space(&self) -> Result<DmaSpace, VfioPciError> {
        match &self.backend {
            Backend::Containers(kvm_vfio) => {
                let container = VfioContainer::new(kvm_vfio.clone()).map_err(container_error)?;
                Ok(DmaSpace::Container(Arc::new(container)))
            }
            Backend::Iommufd(iommufd, _, kvm) => {
                let ioas = VfioIommufd::new(iommufd.clone(), None, None).map_err(|source| VfioPciError::Vfio {
                    what: "cannot create an address space (IOAS) of /dev/iommu".to_string(),
                    source,
                })?;
                Ok(DmaSpace::Ioas { ioas: Arc::new(ioas), kvm: kvm.clone() })
            }
        }
    }

    /// Creates the mapper of `endpoint`. `function` is the device of the endpoint, and must be the only device attached to `space`. The
    /// mapper keeps `memory`, which owns the guest RAM and all other memory that will be mapped. With IOMMUFD, a mapper can adopt the
    /// endpoints of the other mappers of this `HostIommu`.
    pub fn mapper(
        &self,
        space: DmaSpace,
        endpoint: EndpointId,
        function: &VfioPciDevice,
        memory: impl Any + Send,
    ) -> Result<VfioMapper, VfioPciError> {
        let devices = match &self.backend {
            Backend::Containers(_) => None,
            Backend::Iommufd(_, devices, _) => {
                devices.insert(endpoint, function.attachable());
                Some(devices.clone())
            }
        };
        VfioMapper::new(space, devices, memory)
    }
}

fn container_error(error: VfioError) -> VfioPciError {
    match error {
        VfioError::OpenContainer(source) => file_error(PathBuf::from("/dev/vfio/vfio"), source),
        VfioError::VfioExtension => VfioPciError::NoType1,
        source => VfioPciError::Vfio { what: "cannot open a VFIO container".to_string(), source },
    }
}

fn iommufd_error(source: io::Error) -> VfioPciError {
    match file_error(PathBuf::from("/dev/iommu"), source) {
        VfioPciError::NoVfio { .. } => VfioPciError::NoIommufd,
        error => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_iommufd_error_names_the_remedy() {
        for errno in [libc::ENOENT, libc::ENODEV, libc::ENXIO] {
            let error = iommufd_error(io::Error::from_raw_os_error(errno));
            assert!(error.is_user_error(), "{error}");
            assert!(error.to_string().contains("turn platform.iommufd off"), "{error}");
        }
        let error = iommufd_error(io::Error::from_raw_os_error(libc::EACCES));
        assert!(error.to_string().starts_with("/dev/iommu: Permission denied"), "{error}");
    }
}

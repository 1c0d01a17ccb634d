// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! VFIO containers: the host-side I/O address spaces, and guest RAM in one of them.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use iommu_bounce::Permissions;
use log::error;
use vfio_ioctls::{VfioContainer, VfioDeviceFd, VfioError};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion, VolatileSlice};

use super::error::VfioPciError;
use super::ioctl;

/// Opens a container. With `kvm_vfio`, KVM's own VFIO device, KVM learns which groups the VM uses.
pub fn open_container(kvm_vfio: Option<Arc<VfioDeviceFd>>) -> Result<Arc<VfioContainer>, VfioPciError> {
    let container = VfioContainer::new(kvm_vfio).map_err(|error| match error {
        VfioError::OpenContainer(source) => file_error(PathBuf::from("/dev/vfio/vfio"), source),
        VfioError::VfioExtension => VfioPciError::NoType1,
        source => VfioPciError::Vfio { what: "opening a VFIO container".to_string(), source },
    })?;
    Ok(Arc::new(container))
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

/// Guest RAM mapped in a container, each address at itself, until this is dropped.
pub struct GuestRamMapping {
    container: Arc<VfioContainer>,
    memory: GuestMemoryMmap,
    /// How many of the memory's regions are mapped.
    mapped: usize,
}

/// Maps all of `memory` in `container`, IOVA equal to GPA, readable and writable: what devices without a virtual IOMMU
/// need. The container must have a device already. All of it is pinned.
pub fn map_guest_ram(
    container: &Arc<VfioContainer>,
    memory: &GuestMemoryMmap,
) -> Result<GuestRamMapping, VfioPciError> {
    let mut mapping = GuestRamMapping { container: container.clone(), memory: memory.clone(), mapped: 0 };
    for region in memory.iter() {
        let slice = region.as_volatile_slice().map_err(io::Error::other);
        let result = slice.and_then(|slice: VolatileSlice<'_, _>| {
            let everything = Permissions::READ | Permissions::WRITE;
            ioctl::map_dma(&**container, region.start_addr().raw_value(), &slice, everything)
        });
        result.map_err(|source| map_error(region.start_addr().raw_value(), region.len(), source))?;
        mapping.mapped += 1;
    }
    Ok(mapping)
}

fn map_error(gpa: u64, len: u64, source: io::Error) -> VfioPciError {
    let hint = match source.raw_os_error() {
        Some(libc::ENOMEM) => {
            " (all guest RAM is pinned: raise the limit on locked memory, ulimit -l, or use iommu=on)"
        }
        _ => "",
    };
    VfioPciError::Host { what: format!("mapping {len:#x} bytes of guest RAM at {gpa:#x} for DMA{hint}"), source }
}

impl Drop for GuestRamMapping {
    fn drop(&mut self) {
        for region in self.memory.iter().take(self.mapped) {
            let (start, len) = (region.start_addr().raw_value(), region.len());
            match ioctl::unmap_dma(&*self.container, start, len) {
                Ok(done) if done == len => {}
                Ok(done) => error!("VFIO unmapped {done:#x} bytes of {len:#x} of guest RAM at {start:#x}"),
                // The container's last device is closed and its address space gone.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
                Err(error) => error!("unmapping guest RAM at {start:#x}: {error}"),
            }
        }
    }
}

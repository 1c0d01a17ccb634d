// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The I/O address space of an endpoint behind virtio-iommu.

use std::any::Any;
use std::io;
use std::ops::RangeInclusive;

use iommu_bounce::{DmaMapper, EndpointId, MapError, MapperGroup, MapperLimits, Permissions, UnmapError};
use log::{error, warn};
use rustix::process::{Resource, getrlimit};
use vm_memory::VolatileSlice;

use super::dma_space::DmaSpace;
use super::endpoint_devices::EndpointDevices;
use super::unmaps::Unmaps;
use crate::host_memory::missing_memory;
use crate::throttle::Throttle;
use crate::vfio::error::VfioPciError;

/// Mapper group that contains all mappers of the VM's one IOMMUFD. Each address space of the IOMMUFD can adopt each device of the IOMMUFD.
const GROUP: MapperGroup = MapperGroup(0);

/// Mapper for the devices of one host address space. The mapper grants exactly the permissions that the caller asks for.
///
/// Dropping the mapper empties the address space.
pub struct VfioMapper {
    space: DmaSpace,
    limits: MapperLimits,
    /// Devices that can be attached to other address spaces. `None` with containers.
    devices: Option<EndpointDevices>,
    /// Owner of the mapped memory, which must live as long as the mappings. A slice that is passed to `map` is valid only during the call.
    _memory: Box<dyn Any + Send>,
    throttle: Throttle,
    unmaps: Unmaps,
}

impl VfioMapper {
    pub(crate) fn new(
        space: DmaSpace,
        devices: Option<EndpointDevices>,
        memory: impl Any + Send,
    ) -> Result<Self, VfioPciError> {
        let limits = space.limits().map_err(|source| VfioPciError::Host {
            what: "cannot query VFIO for the limits of the host's IOMMU".to_string(),
            source,
        })?;
        Ok(Self {
            space,
            limits,
            devices,
            _memory: Box::new(memory),
            throttle: Throttle::default(),
            unmaps: Unmaps::default(),
        })
    }

    /// Excludes `ranges` from the IOVAs that the guest can map. The ranges consist of whole pages. DMA to these ranges may reach another
    /// function instead of the host's IOMMU.
    #[must_use]
    pub fn without(mut self, ranges: &[RangeInclusive<u64>]) -> Self {
        for range in ranges {
            self.limits.iova_ranges = self.limits.iova_ranges.iter().flat_map(|usable| cut(usable, range)).collect();
        }
        self
    }

    /// If a limit of the host was reached, logs this limit and the remedy.
    fn explain(&self, error: &io::Error) {
        let has_hint = matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::ENOMEM | libc::EFAULT));
        if has_hint
            && self.throttle.pass()
            && let Some(hint) = limit_reached(error, missing_memory)
        {
            warn!("VFIO cannot map memory for a device: {hint}");
        }
    }
}

/// Returns the parts of `usable` that are outside `taken`.
fn cut(usable: &RangeInclusive<u64>, taken: &RangeInclusive<u64>) -> impl Iterator<Item = RangeInclusive<u64>> + use<> {
    let (first, last) = (*usable.start(), *usable.end());
    let below = taken.start().checked_sub(1).map(|end| first..=end.min(last));
    let above = taken.end().checked_add(1).map(|start| start.max(first)..=last);
    below.into_iter().chain(above).filter(|range| !range.is_empty())
}

/// Converts an error of the kernel to an error of the engine.
fn classify(error: io::Error) -> MapError {
    match error.raw_os_error() {
        Some(libc::EEXIST) => MapError::Exists,
        Some(libc::ENOSPC | libc::ENOMEM) => MapError::NoResources,
        _ => MapError::Host(error),
    }
}

/// Describes the limit of the host that made the kernel reject a mapping, and the remedy. Returns `None` if no limit is the reason.
/// `missing_memory` describes guest memory that the host cannot supply, if any such memory exists.
fn limit_reached(error: &io::Error, missing_memory: impl FnOnce() -> Option<String>) -> Option<String> {
    match error.raw_os_error()? {
        libc::ENOSPC => Some(
            "the device's VFIO container holds as many mappings as the host allows; raise dma_entry_limit of module vfio_iommu_type1, \
             or turn platform.iommufd on, because IOMMUFD has no such limit"
                .to_string(),
        ),
        libc::ENOMEM => {
            let limit = getrlimit(Resource::Memlock).current;
            let limit = limit.map_or_else(|| "unlimited".to_string(), |bytes| format!("{bytes} bytes"));
            Some(format!(
                "the host cannot pin more memory for this process: the host needs free memory, and the process needs CAP_IPC_LOCK or a sufficient \
                 limit on locked memory (now {limit}; see ulimit -l and LimitMEMLOCK=)"
            ))
        }
        libc::EFAULT => Some(missing_memory().unwrap_or_else(|| {
            "the host's kernel cannot pin this kind of memory: for writing, Linux 6.5 and later pins files only on tmpfs or hugetlbfs, \
             so move the file of --pmem or of the memory zone there, or set discard_writes=on for --pmem; IOMMUFD also cannot pin \
             BARs of other devices"
                .to_string()
        })),
        _ => None,
    }
}

impl DmaMapper for VfioMapper {
    fn map(&mut self, iova: u64, memory: VolatileSlice<'_>, permissions: Permissions) -> Result<(), MapError> {
        self.space.map(iova, &memory, permissions).inspect_err(|error| self.explain(error)).map_err(classify)
    }

    fn unmap(&mut self, iova: u64, len: u64) -> Result<(), UnmapError> {
        let (space, throttle) = (&self.space, &self.throttle);
        self.unmaps.unmap(
            iova,
            len,
            |iova, len| space.unmap(iova, len),
            |done| {
                if throttle.pass() {
                    error!("VFIO unmapped only {done:#x} of {len:#x} bytes at IOVA {iova:#x}: the rest was not mapped");
                }
            },
        )
    }

    fn limits(&self) -> MapperLimits {
        self.limits.clone()
    }

    fn keeps_page_tables(&self) -> bool {
        true
    }

    fn group(&self) -> Option<MapperGroup> {
        self.devices.as_ref().map(|_| GROUP)
    }

    fn adopt(&mut self, endpoint: EndpointId) -> io::Result<()> {
        let devices = self.devices.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        // When the first device is attached, the kernel pins all mapped memory. So this call may reach a limit of the host, like `map`.
        devices.attach(endpoint, &self.space).inspect_err(|error| self.explain(error))
    }
}

impl Drop for VfioMapper {
    fn drop(&mut self) {
        // Empty the address space before its memory is dropped.
        if let Err(error) = self.space.unmap_all() {
            error!("VFIO cannot unmap all memory of a device's address space: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cut_removes_the_taken_range_from_the_usable_one() {
        let left = |usable, taken| cut(&usable, &taken).collect::<Vec<_>>();
        assert_eq!(left(0..=0xffff, 0x4000..=0x4fff), [0..=0x3fff, 0x5000..=0xffff]);
        assert_eq!(left(0x1000..=0xffff, 0..=0x1fff), vec![0x2000..=0xffff]);
        assert_eq!(left(0..=u64::MAX, 0xf000..=u64::MAX), vec![0..=0xefff]);
        assert_eq!(left(0x1000..=0x1fff, 0..=0xffff), vec![]);
        assert_eq!(left(0..=0xfff, 0x2000..=0x2fff), vec![0..=0xfff]);
    }

    #[test]
    fn host_limit_errors_mean_no_resources_and_hint_the_fix() {
        for (errno, hint) in [(libc::ENOSPC, "dma_entry_limit"), (libc::ENOMEM, "ulimit -l")] {
            let error = io::Error::from_raw_os_error(errno);
            let text = limit_reached(&error, || None).unwrap();
            assert!(text.contains(hint) && text.lines().count() == 1, "{text}");
            assert!(matches!(classify(error), MapError::NoResources));
        }
    }

    #[test]
    fn other_errors_are_no_limits() {
        let error = io::Error::from_raw_os_error(libc::EEXIST);
        assert_eq!(limit_reached(&error, || None), None);
        assert!(matches!(classify(error), MapError::Exists));
        let error = io::Error::from_raw_os_error(libc::EFAULT);
        assert!(limit_reached(&error, || None).unwrap().contains("tmpfs"));
        let missing = || Some("zone 'a', file /x; the file was truncated".to_string());
        assert_eq!(limit_reached(&error, missing), missing());
        assert!(matches!(classify(error), MapError::Host(_)));
    }
}

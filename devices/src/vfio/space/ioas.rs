// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Requests to IOMMUFD for one I/O address space (`include/uapi/linux/iommufd.h`).

use std::io;
use std::ops::RangeInclusive;

use iommu_bounce::{MapperLimits, Permissions};
use iommufd_bindings::iommufd::{
    iommu_ioas_map, iommu_ioas_unmap, iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE, iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE,
};
use iommufd_ioctls::IommufdError;
use vfio_ioctls::VfioIommufd;
use vm_memory::VolatileSlice;

use super::iommufd_ioctl::{self, size_field};

/// Smallest page size reported to the guest, even if the host's IOMMU supports smaller pages.
const PAGE_SIZE: u64 = 4096;

/// Maps `memory` at `iova` for the devices of `ioas`. The pages are pinned as soon as a device is attached.
pub(crate) fn map(
    ioas: &VfioIommufd,
    iova: u64,
    memory: &VolatileSlice<'_>,
    permissions: Permissions,
) -> io::Result<()> {
    let mut flags = iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA;
    if permissions.contains(Permissions::READ) {
        flags |= iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE;
    }
    if permissions.contains(Permissions::WRITE) {
        flags |= iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE;
    }
    let request = iommu_ioas_map {
        size: size_field::<iommu_ioas_map>(),
        flags,
        ioas_id: ioas.ioas().id(),
        // Only the kernel uses the address, to pin the pages at this address. The memory is a `VolatileSlice`, so nothing in this process
        // relies on its contents, which the device may change.
        user_va: memory.ptr_guard_mut().as_ptr() as u64,
        length: memory.len() as u64,
        iova,
        ..Default::default()
    };
    ioas.iommufd().map_iommu_ioas(&request).map_err(io_error)
}

/// Unmaps `[iova, iova + len)`, which must be whole mappings. Returns the number of bytes that were mapped in this range.
///
/// Unlike type 1, IOMMUFD unmaps one mapping after the other, and stops at a mapping that the range splits.
pub(crate) fn unmap(ioas: &VfioIommufd, iova: u64, length: u64) -> io::Result<u64> {
    let size = size_field::<iommu_ioas_unmap>();
    let mut request = iommu_ioas_unmap { size, ioas_id: ioas.ioas().id(), iova, length };
    ioas.iommufd().unmap_iommu_ioas(&mut request).map_err(io_error)?;
    Ok(request.length)
}

/// Unmaps everything.
pub(crate) fn unmap_all(ioas: &VfioIommufd) -> io::Result<()> {
    match unmap(ioas, 0, u64::MAX) {
        // Nothing was mapped.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        outcome => outcome.map(drop),
    }
}

/// Returns the limits that result from the attached devices. IOMMUFD does not limit the number of mappings.
pub(crate) fn limits(ioas: &VfioIommufd) -> io::Result<MapperLimits> {
    let (ranges, alignment) = iommufd_ioctl::iova_ranges(ioas.iommufd(), ioas.ioas().id())?;
    Ok(describe(&ranges, alignment))
}

fn describe(ranges: &[(u64, u64)], alignment: u64) -> MapperLimits {
    let granule = alignment.max(PAGE_SIZE).next_power_of_two();
    let iova_ranges: Vec<RangeInclusive<u64>> =
        ranges.iter().map(|(start, last)| *start..=*last).filter(|range| !range.is_empty()).collect();
    // Any multiple of the granule can be mapped. The kernel chooses larger pages of the IOMMU by itself.
    MapperLimits { page_size_mask: !(granule - 1), iova_ranges, max_mappings: None }
}

/// Extracts the kernel's error from an error of the library.
pub(crate) fn io_error(error: IommufdError) -> io::Error {
    match error {
        IommufdError::OpenIommufd(source) => source,
        IommufdError::IommuDestroy(source)
        | IommufdError::IommuIoasAlloc(source)
        | IommufdError::IommuIoasMap(source)
        | IommufdError::IommuIoasUnmap(source) => source.into(),
        error => io::Error::other(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_in_whole_pages_without_empty_ranges() {
        let limits = describe(&[(0, 0xfedf_ffff), (9, 8), (0xfef0_0000, 0xff_ffff_ffff)], 1);
        assert_eq!(limits.page_size_mask, !0xfff);
        assert_eq!(limits.iova_ranges, [0..=0xfedf_ffff, 0xfef0_0000..=0xff_ffff_ffff]);
        assert_eq!(limits.max_mappings, None);
        assert_eq!(describe(&[], 0x4000).page_size_mask, !0x3fff);
    }

    #[test]
    fn error_number_of_the_kernel_is_kept() {
        let error = IommufdError::IommuIoasMap(vmm_sys_util::errno::Error::new(libc::ENOMEM));
        assert_eq!(io_error(error).raw_os_error(), Some(libc::ENOMEM));
    }
}

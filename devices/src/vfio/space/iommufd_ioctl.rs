// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Request to IOMMUFD that `iommufd-ioctls` lacks.

use std::io;

use iommufd_bindings::iommufd::{IOMMUFD_CMD_IOAS_IOVA_RANGES, IOMMUFD_TYPE, iommu_ioas_iova_ranges, iommu_iova_range};
use iommufd_ioctls::IommuFd;
use vmm_sys_util::ioctl::ioctl_with_mut_ref;
use vmm_sys_util::ioctl_io_nr;

ioctl_io_nr!(IOMMU_IOAS_IOVA_RANGES, IOMMUFD_TYPE as u32, IOMMUFD_CMD_IOAS_IOVA_RANGES);

/// Returns the size of the request structure `T`, for its `size` field.
pub(crate) const fn size_field<T>() -> u32 {
    let size = size_of::<T>();
    assert!(size <= 4096);
    #[expect(clippy::cast_possible_truncation, reason = "checked above")]
    let size = size as u32;
    size
}

/// Returns the IOVA ranges (first, last) that can be mapped in address space `ioas_id`, and the alignment of
/// mappings.
pub(crate) fn iova_ranges(iommufd: &IommuFd, ioas_id: u32) -> io::Result<(Vec<(u64, u64)>, u64)> {
    /// Maximum number of ranges that this function has room for.
    const MOST: u32 = 1 << 16;
    let mut room = 16;
    loop {
        let mut ranges = vec![iommu_iova_range::default(); room as usize];
        let mut request = iommu_ioas_iova_ranges {
            size: size_field::<iommu_ioas_iova_ranges>(),
            ioas_id,
            num_iovas: room,
            allowed_iovas: ranges.as_mut_ptr() as u64,
            ..Default::default()
        };
        // SAFETY: The kernel reads and writes the structure, whose size is in `size`. It writes at most `room` ranges to
        // `allowed_iovas`, which points to `room` ranges. Nothing else refers to these ranges during the call.
        let result = unsafe { ioctl_with_mut_ref(iommufd, IOMMU_IOAS_IOVA_RANGES(), &mut request) };
        let needed = request.num_iovas;
        if result < 0 {
            let error = io::Error::last_os_error();
            if error.raw_os_error() == Some(libc::EMSGSIZE) && needed > room && needed <= MOST {
                room = needed;
                continue;
            }
            return Err(error);
        }
        ranges.truncate(needed as usize);
        return Ok((ranges.iter().map(|range| (range.start, range.last)).collect(), request.out_iova_alignment));
    }
}

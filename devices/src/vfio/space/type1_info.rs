// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Answer of `VFIO_IOMMU_GET_INFO`: page sizes, and a chain of capabilities (`include/uapi/linux/vfio.h`).

use std::ops::RangeInclusive;

use iommu_bounce::MapperLimits;
use vfio_bindings::bindings::vfio::{
    VFIO_IOMMU_INFO_CAPS, VFIO_IOMMU_INFO_PGSIZES, VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE,
    VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL,
};

/// Offsets in `struct vfio_iommu_type1_info`.
const FLAGS: usize = 4;
const PAGE_SIZES: usize = 8;
const CAP_OFFSET: usize = 16;
/// Minimum size of a structure with capabilities.
const WITH_CAPS: usize = 24;
/// Maximum length of the capability chain. A longer chain counts as a loop.
const MOST_CAPABILITIES: usize = 64;

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|b| u16::from_ne_bytes(*b))
}
fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|b| u32::from_ne_bytes(*b))
}
fn long(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().map(|b| u64::from_ne_bytes(*b))
}

/// Reads the limits from the structure. A limit that the kernel does not report counts as unlimited. If the kernel reports no page
/// sizes, the page size is 4 KiB.
pub(crate) fn parse(bytes: &[u8]) -> MapperLimits {
    let flags = word(bytes, FLAGS).unwrap_or(0);
    let page_sizes = long(bytes, PAGE_SIZES).filter(|mask| *mask != 0 && flags & VFIO_IOMMU_INFO_PGSIZES != 0);
    let mut limits =
        MapperLimits { page_size_mask: page_sizes.unwrap_or(1 << 12), iova_ranges: Vec::new(), max_mappings: None };
    let mut at = match word(bytes, CAP_OFFSET) {
        Some(offset) if flags & VFIO_IOMMU_INFO_CAPS != 0 => offset as usize,
        _ => 0,
    };
    let mut left = MOST_CAPABILITIES;
    while at >= WITH_CAPS && left > 0 {
        let (Some(id), Some(next)) = (half(bytes, at), word(bytes, at + 4)) else { break };
        match u32::from(id) {
            VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE => limits.iova_ranges = ranges(bytes, at),
            VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL => limits.max_mappings = word(bytes, at + 8),
            _ => {}
        }
        at = next as usize;
        left -= 1;
    }
    if limits.iova_ranges.is_empty() {
        limits.iova_ranges.push(0..=u64::MAX);
    }
    limits
}

/// Reads `struct vfio_iommu_type1_info_cap_iova_range` at `at`: a count after the header, then pairs of first and
/// last IOVA.
fn ranges(bytes: &[u8], at: usize) -> Vec<RangeInclusive<u64>> {
    let count = word(bytes, at + 8).unwrap_or(0) as usize;
    let pair = |index: usize| Some(long(bytes, at + 16 + 16 * index)?..=long(bytes, at + 24 + 16 * index)?);
    (0..count).map_while(pair).filter(|range| !range.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(flags: u32, page_sizes: u64, cap_offset: u32) -> Vec<u8> {
        let mut bytes = vec![0; 4];
        bytes.extend(flags.to_ne_bytes());
        bytes.extend(page_sizes.to_ne_bytes());
        bytes.extend(cap_offset.to_ne_bytes());
        bytes.extend([0; 4]);
        bytes
    }

    fn cap(bytes: &mut Vec<u8>, id: u32, next: u32, body: &[u8]) {
        bytes.extend(u16::try_from(id).unwrap().to_ne_bytes());
        bytes.extend(1u16.to_ne_bytes());
        bytes.extend(next.to_ne_bytes());
        bytes.extend(body);
    }

    fn range_body(pairs: &[(u64, u64)]) -> Vec<u8> {
        let mut body = u32::try_from(pairs.len()).unwrap().to_ne_bytes().to_vec();
        body.extend([0; 4]);
        for (first, last) in pairs {
            body.extend(first.to_ne_bytes());
            body.extend(last.to_ne_bytes());
        }
        body
    }

    #[test]
    fn chain_of_capabilities_is_read() {
        let mut bytes = header(3, 0x4020_1000, 24);
        let pairs = [(0, 0xfedf_ffff), (0xfef0_0000, 0xffff_ffff_ffff)];
        cap(&mut bytes, VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE, 24 + 16 + 32, &range_body(&pairs));
        cap(&mut bytes, VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL, 0, &65535u32.to_ne_bytes());
        let limits = parse(&bytes);
        assert_eq!(limits.page_size_mask, 0x4020_1000);
        assert_eq!(limits.iova_ranges, [0..=0xfedf_ffff, 0xfef0_0000..=0xffff_ffff_ffff]);
        assert_eq!(limits.max_mappings, Some(65535));
    }

    #[test]
    fn structure_without_capabilities_is_unlimited() {
        let limits = parse(&header(0, 0, 24));
        assert_eq!((limits.page_size_mask, limits.max_mappings), (0x1000, None));
        assert_eq!(limits.iova_ranges, [0..=u64::MAX]);
        assert_eq!(parse(&[]).iova_ranges, [0..=u64::MAX]);
    }

    #[test]
    fn chain_that_loops_or_leaves_the_bytes_ends() {
        let mut bytes = header(3, 0x1000, 24);
        cap(&mut bytes, VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL, 24, &7u32.to_ne_bytes());
        assert_eq!(parse(&bytes).max_mappings, Some(7));
        bytes[28..32].copy_from_slice(&u32::MAX.to_ne_bytes());
        assert_eq!(parse(&bytes).max_mappings, Some(7));
    }

    #[test]
    fn ranges_beyond_the_bytes_are_left_out() {
        let mut bytes = header(3, 0x1000, 24);
        let mut body = range_body(&[(0, 9)]);
        body[..4].copy_from_slice(&u32::MAX.to_ne_bytes());
        cap(&mut bytes, VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE, 0, &body);
        assert_eq!(parse(&bytes).iova_ranges, [0..=9]);
    }
}

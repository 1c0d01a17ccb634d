// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Translation limits that all endpoints have in common. The virtio-iommu offers the guest exactly these limits.

use std::ops::RangeInclusive;

use carom_api::limits::CHUNK_SIZE;
use iommu_bounce::MapperLimits;
use rangemap::RangeInclusiveSet;

use crate::arch::layout::PAGE_SIZE;

/// Returns the page sizes that every endpoint's host IOMMU supports, without sizes below the host's page size.
pub(super) fn page_size_mask(limits: &[MapperLimits]) -> u64 {
    limits.iter().fold(!(PAGE_SIZE - 1), |mask, limits| mask & limits.page_size_mask)
}

/// Last IOVA of the virtio-iommu's range if no endpoint exists yet. Even the smallest host IOMMUs translate this IOVA (39 bits, three
/// levels of page tables).
const LEAST_RANGE: u64 = (1 << 39) - 1;

/// Returns the range of IOVAs that the virtio-iommu translates. The range starts at 0, and its IOVAs have at most `bits` bits. It ends at
/// the highest IOVA that every endpoint's host IOMMU can translate. If an endpoint is added later, its host IOMMU may translate fewer
/// IOVAs. For this endpoint, the guest then sees the remaining IOVAs of the range as reserved regions.
pub(super) fn input_range(limits: &[MapperLimits], bits: u8) -> RangeInclusive<u64> {
    let highest = |limits: &MapperLimits| limits.iova_ranges.iter().map(|range| *range.end()).max();
    let most = u64::MAX.unbounded_shr(64u32.saturating_sub(bits.into()));
    0..=limits.iter().filter_map(highest).min().unwrap_or(LEAST_RANGE).min(most)
}

/// Returns the largest range of whole chunks in `whole` that every endpoint's host IOMMU can translate. Returns `None` if the host reserves
/// a part of every chunk.
pub(super) fn window_aperture(whole: &RangeInclusive<u64>, limits: &[MapperLimits]) -> Option<RangeInclusive<u64>> {
    // If several ranges are the largest, this returns the first of them.
    free_chunks(whole, limits).into_iter().rev().max_by_key(len)
}

/// Returns the first range of `bytes` bytes in `whole` that every endpoint's host IOMMU can translate. The range starts at a chunk
/// boundary. If no such range exists, returns the largest range of whole chunks instead.
pub(super) fn first_aperture(
    whole: &RangeInclusive<u64>,
    bytes: u64,
    limits: &[MapperLimits],
) -> Option<RangeInclusive<u64>> {
    let parts = free_chunks(whole, limits);
    let first = parts.iter().find(|part| len(part) >= bytes);
    first.map_or_else(
        || parts.iter().cloned().rev().max_by_key(len),
        |part| Some(*part.start()..=part.start() + (bytes - 1)),
    )
}

fn len(range: &RangeInclusive<u64>) -> u64 {
    (range.end() - range.start()).saturating_add(1)
}

/// Returns the ranges in `whole` that every endpoint's host IOMMU can translate. Each range consists of whole chunks.
fn free_chunks(whole: &RangeInclusive<u64>, limits: &[MapperLimits]) -> Vec<RangeInclusive<u64>> {
    let mut free = RangeInclusiveSet::from_iter([whole.clone()]);
    for limits in limits {
        let mut reserved = RangeInclusiveSet::from_iter([whole.clone()]);
        limits.iova_ranges.iter().cloned().for_each(|range| reserved.remove(range));
        reserved.into_iter().for_each(|range| free.remove(range));
    }
    let in_chunks = |range: RangeInclusive<u64>| {
        let start = range.start().next_multiple_of(CHUNK_SIZE);
        // The end of the 64-bit address space (2^64) does not fit in a u64, so the last chunk of the address space is left out.
        let end = range.end().saturating_add(1) / CHUNK_SIZE * CHUNK_SIZE;
        (start < end).then(|| start..=end - 1)
    };
    free.into_iter().filter_map(in_chunks).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const APERTURE: RangeInclusive<u64> = 0xc000_0000..=0xdfff_ffff;

    fn window_aperture(limits: &[MapperLimits]) -> Option<RangeInclusive<u64>> {
        super::window_aperture(&APERTURE, limits)
    }

    fn limits(ranges: &[RangeInclusive<u64>]) -> MapperLimits {
        MapperLimits { page_size_mask: 0x4020_1000, iova_ranges: ranges.to_vec(), max_mappings: None }
    }

    #[test]
    fn range_and_pages_are_what_all_hosts_have() {
        let wide = MapperLimits { page_size_mask: !0xfff, ..limits(&[0..=0xfedf_ffff, 0xfef0_0000..=(1 << 48) - 1]) };
        let narrow = limits(&[0..=0xfedf_ffff, 0xfef0_0000..=(1 << 39) - 1]);
        let both = [wide, narrow];
        assert_eq!(input_range(&both, 64), 0..=(1 << 39) - 1);
        assert_eq!(page_size_mask(&both), 0x4020_1000);
        assert_eq!((input_range(&[], 64), page_size_mask(&[])), (0..=LEAST_RANGE, !0xfff));
        assert_eq!(input_range(&both, 36), 0..=(1 << 36) - 1, "no more than the requested bits");
        assert_eq!(input_range(&both, 40), 0..=(1 << 39) - 1);
    }

    #[test]
    fn aperture_is_whole_if_nothing_is_reserved() {
        let free = limits(&[0..=0xfedf_ffff, 0xfef0_0000..=u64::MAX]);
        assert_eq!(window_aperture(&[free]), Some(APERTURE));
        assert_eq!(window_aperture(&[]), Some(APERTURE));
    }

    #[test]
    fn aperture_avoids_ranges_that_any_host_reserves() {
        let low = limits(&[0..=0xc000_0fff, 0xc000_2000..=u64::MAX]);
        let high = limits(&[0..=0xd000_0000, 0xd800_0000..=u64::MAX]);
        // `low` reserves a page of the first chunk. `high` reserves the third quarter of the aperture, except the quarter's first byte.
        let both = [low, high];
        assert_eq!(window_aperture(&both[..1]), Some(0xc020_0000..=0xdfff_ffff));
        assert_eq!(window_aperture(&both), Some(0xc020_0000..=0xcfff_ffff));
    }

    #[test]
    fn aperture_behind_ram_is_the_first_that_is_large_enough() {
        let behind = |limits: &[MapperLimits]| first_aperture(&(8 << 30..=LEAST_RANGE), 0x2000_0000, limits);
        assert_eq!(behind(&[limits(&[0..=u64::MAX])]), Some(0x2_0000_0000..=0x2_1fff_ffff));
        assert_eq!(behind(&[]), Some(0x2_0000_0000..=0x2_1fff_ffff));
        let holes = limits(&[0..=0x2_1000_0000, 0x2_2000_0000..=0x7f_ffff_ffff]);
        assert_eq!(behind(std::slice::from_ref(&holes)), Some(0x2_2000_0000..=0x2_3fff_ffff));
        let narrow = limits(&[0..=0x2_2fff_ffff]);
        assert_eq!(behind(&[holes, narrow]), Some(0x2_0000_0000..=0x2_0fff_ffff), "the largest part");
        assert_eq!(behind(&[limits(&[0..=0x1_ffff_ffff])]), None);
    }

    #[test]
    fn aperture_is_missing_if_no_chunk_is_free() {
        assert_eq!(window_aperture(&[limits(&[0..=0xc01f_fffe, 0xdfff_0000..=u64::MAX])]), None);
        assert_eq!(window_aperture(&[limits(&[0..=0xbfff_ffff])]), None);
    }
}

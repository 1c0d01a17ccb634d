// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the mappers of all endpoints can translate: the virtio-iommu offers the guest that and no more.

use std::ops::RangeInclusive;

use carom_api::limits::CHUNK_SIZE;
use iommu_bounce::MapperLimits;
use rangemap::RangeInclusiveSet;

use crate::arch::layout::PAGE_SIZE;

/// The page sizes that every endpoint's host IOMMU has, none below the host's pages.
pub(super) fn page_size_mask(limits: &[MapperLimits]) -> u64 {
    limits.iter().fold(!(PAGE_SIZE - 1), |mask, limits| mask & limits.page_size_mask)
}

/// Where there is no endpoint yet: what the smallest host IOMMUs can translate (39 bits, a third level of page tables).
const LEAST_RANGE: u64 = (1 << 39) - 1;

/// From 0 to the highest IOVA that every endpoint's host IOMMU can translate. What one that comes later cannot, the
/// guest is told of as reserved.
pub(super) fn input_range(limits: &[MapperLimits]) -> RangeInclusive<u64> {
    let highest = |limits: &MapperLimits| limits.iova_ranges.iter().map(|range| *range.end()).max();
    0..=limits.iter().filter_map(highest).min().unwrap_or(LEAST_RANGE)
}

/// The largest part of `whole` that every endpoint's host IOMMU can translate, in whole chunks; `None` where
/// the host reserves something in each of them.
pub(super) fn window_aperture(whole: &RangeInclusive<u64>, limits: &[MapperLimits]) -> Option<RangeInclusive<u64>> {
    let mut free = RangeInclusiveSet::from_iter([whole.clone()]);
    for limits in limits {
        let mut reserved = RangeInclusiveSet::from_iter([whole.clone()]);
        limits.iova_ranges.iter().cloned().for_each(|range| reserved.remove(range));
        reserved.into_iter().for_each(|range| free.remove(range));
    }
    let in_chunks = |range: RangeInclusive<u64>| {
        let start = range.start().next_multiple_of(CHUNK_SIZE);
        let end = (range.end() + 1) / CHUNK_SIZE * CHUNK_SIZE;
        (start < end).then(|| start..=end - 1)
    };
    let parts: Vec<_> = free.into_iter().filter_map(in_chunks).collect();
    // Of several that are as large, the first.
    parts.into_iter().rev().max_by_key(|range| range.end() - range.start())
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
        assert_eq!(input_range(&both), 0..=(1 << 39) - 1);
        assert_eq!(page_size_mask(&both), 0x4020_1000);
        assert_eq!((input_range(&[]), page_size_mask(&[])), (0..=LEAST_RANGE, !0xfff));
    }

    #[test]
    fn aperture_is_whole_where_nothing_is_reserved() {
        let free = limits(&[0..=0xfedf_ffff, 0xfef0_0000..=u64::MAX]);
        assert_eq!(window_aperture(&[free]), Some(APERTURE));
        assert_eq!(window_aperture(&[]), Some(APERTURE));
    }

    #[test]
    fn aperture_keeps_clear_of_what_any_host_reserves() {
        let low = limits(&[0..=0xc000_0fff, 0xc000_2000..=u64::MAX]);
        let high = limits(&[0..=0xd000_0000, 0xd800_0000..=u64::MAX]);
        // A page of the first chunk is reserved, and the third quarter but for its first byte.
        let both = [low, high];
        assert_eq!(window_aperture(&both[..1]), Some(0xc020_0000..=0xdfff_ffff));
        assert_eq!(window_aperture(&both), Some(0xc020_0000..=0xcfff_ffff));
    }

    #[test]
    fn there_is_no_aperture_where_no_chunk_is_free() {
        assert_eq!(window_aperture(&[limits(&[0..=0xc01f_fffe, 0xdfff_0000..=u64::MAX])]), None);
        assert_eq!(window_aperture(&[limits(&[0..=0xbfff_ffff])]), None);
    }
}

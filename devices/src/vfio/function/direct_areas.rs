// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Parts of a BAR that the guest may access without an exit.

use std::ops::Range;

/// Page size in bytes. Memory slots consist of whole pages.
pub(crate) const PAGE: u64 = 4096;
/// Maximum number of areas of one BAR that the guest accesses without an exit. Each area needs one of the VM's few memory slots.
const MOST_AREAS: usize = 16;

/// Returns the areas of a BAR that the guest may access without an exit. The BAR has `size` bytes. The areas consist of whole pages that
/// lie in the `mappable` areas and contain no byte of the `trapped` ranges. Each mappable area has an offset and a size, as the host
/// reports them. The result is sorted, and its areas do not touch.
pub(crate) fn direct_areas(size: u64, mappable: &[(u64, u64)], trapped: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut areas: Vec<Range<u64>> = mappable
        .iter()
        .filter_map(|(offset, len)| {
            let end = offset.checked_add(*len)?.min(size) / PAGE * PAGE;
            let start = offset.checked_next_multiple_of(PAGE)?;
            (start < end).then_some(start..end)
        })
        .collect();
    areas.sort_by_key(|area| area.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for area in areas {
        match merged.last_mut() {
            Some(last) if area.start <= last.end => last.end = last.end.max(area.end),
            _ => merged.push(area),
        }
    }
    for hole in trapped.iter().filter(|hole| !hole.is_empty()) {
        let start = hole.start / PAGE * PAGE;
        let end = hole.end.checked_next_multiple_of(PAGE).unwrap_or(u64::MAX);
        merged = merged
            .into_iter()
            .flat_map(|area| [area.start..area.end.min(start), area.start.max(end)..area.end])
            .filter(|part| part.start < part.end)
            .collect();
    }
    merged.truncate(MOST_AREAS);
    merged
}

#[cfg(test)]
#[expect(clippy::single_range_in_vec_init, reason = "a list of one area is meant")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn table_in_the_middle_leaves_an_area_on_each_side() {
        assert_eq!(direct_areas(0x4000, &[(0, 0x4000)], &[0x2000..0x2410, 0x3000..0x3010]), [0..0x2000]);
        assert_eq!(direct_areas(0x8000, &[(0, 0x8000)], &[0x2ff0..0x3010]), [0..0x2000, 0x4000..0x8000]);
    }

    #[test]
    fn sparse_areas_are_cut_to_whole_pages_within_the_bar() {
        assert_eq!(direct_areas(0x3000, &[(0x10, 0x2000), (0x2000, 0x9000)], &[]), [0x1000..0x3000]);
        assert_eq!(direct_areas(0x3000, &[(u64::MAX, 2), (0, u64::MAX)], &[]), [0..0x3000]);
    }

    #[test]
    fn bar_smaller_than_a_page_traps() {
        assert!(direct_areas(0x800, &[(0, 0x800)], &[]).is_empty());
        assert!(direct_areas(0x800, &[(0, 0x1000)], &[]).is_empty());
    }

    #[test]
    fn nothing_mappable_traps() {
        assert!(direct_areas(0x8000, &[], &[]).is_empty());
        assert!(direct_areas(0x1000, &[(0, 0x1000)], &[0..16]).is_empty());
    }

    proptest! {
        #[test]
        fn page_is_visible_only_if_mappable_and_free_of_traps(
            pages in 0u64..12,
            areas in prop::collection::vec((0u64..0xc000, 0u64..0xc000), 0..4),
            traps in prop::collection::vec((0u64..0xc000, 0u64..0x2000), 0..3),
        ) {
            let traps: Vec<_> = traps.into_iter().map(|(at, len)| at..at + len).collect();
            let visible = direct_areas(pages * PAGE, &areas, &traps);
            prop_assert!(visible.windows(2).all(|pair| pair[0].end <= pair[1].start));
            for page in 0..24 {
                let range = page * PAGE..(page + 1) * PAGE;
                let touches = |hole: &Range<u64>| hole.start < hole.end && hole.start < range.end && range.start < hole.end;
                // The page must lie completely within one area. Two adjoining areas that each hold a part of the page do not count.
                let mappable = areas.iter().any(|(at, len)| *at <= range.start && range.end <= at + len);
                let wanted = page < pages && mappable && !traps.iter().any(touches);
                prop_assert_eq!(visible.iter().any(|s| s.start <= range.start && range.end <= s.end), wanted);
            }
        }
    }
}

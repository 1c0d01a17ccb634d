// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Page tables that the host IOMMU keeps for an address space, estimated from the addresses that were ever mapped. The range
//! that one page-table page translates is its *place*.
//!
//! The host kernel allocates a page-table page when its first address is mapped. The kernel may keep the page after everything that the
//! page translates is unmapped. For example, `domain_unmap()` of `drivers/iommu/intel/iommu.c` frees a table only if one call unmaps
//! everything that the table translates. So the host's memory use depends on the number of places that were ever used by a mapping, not on
//! the current mappings.

use std::ops::RangeInclusive;

use rangemap::RangeInclusiveSet;

/// Size of a place at each level of page tables, as an exponent of two. A page-table page has 512 entries. At the lowest level, each entry
/// translates 4 KiB (Intel VT-d 3.7, AMD IOMMU 2.2.3.2, Arm SMMU with pages of 4 KiB). The single page above these levels is not counted.
const LEVELS: [u32; 3] = [21, 30, 39];
/// Number of places below 4 GiB at the lowest level. Drivers allocate most IOVAs below 4 GiB.
const LOW: usize = 1 << (32 - LEVELS[0]);

/// Page-table pages of an address space. Each level has a tree of ranges, so the memory use grows with the number of ranges.
#[derive(Debug)]
pub(crate) struct TablePages {
    /// One bit for each place below 4 GiB at the lowest level. A bit is set if the page-table page of its place exists. Nearly every
    /// mapping only needs this lookup.
    low: [u64; LOW / 64],
    /// Numbers of the places whose page-table page exists, for each level.
    levels: [RangeInclusiveSet<u64>; LEVELS.len()],
    count: u64,
    max: u64,
}

impl TablePages {
    /// Creates an empty set with a maximum of `max` pages.
    pub(crate) fn new(max: u64) -> Self {
        Self { low: [0; LOW / 64], levels: Default::default(), count: 0, max }
    }

    /// Records that `[start, last]` is mapped. If the mapping would need more page-table pages than the maximum, returns `false` and
    /// records nothing. A small mapping in a known place takes one lookup. Any other mapping takes O(log n) steps, where n is the number of
    /// known places.
    #[must_use]
    pub(crate) fn touch(&mut self, start: u64, last: u64) -> bool {
        let lowest = place(start, last, LEVELS[0]);
        // If the page of a place exists, the pages of the higher levels exist too.
        if lowest.start() == lowest.end() && self.is_known(*lowest.start()) {
            return true;
        }
        let places = LEVELS.map(|level| place(start, last, level));
        let lacking = |(set, places): (&RangeInclusiveSet<u64>, _)| -> u64 {
            set.gaps(places).map(|gap| gap.end() - gap.start() + 1).sum()
        };
        let more: u64 = self.levels.iter().zip(&places).map(lacking).sum();
        if self.count + more > self.max {
            return false;
        }
        if more != 0 {
            self.count += more;
            self.levels.iter_mut().zip(places).for_each(|(set, places)| set.insert(places));
            let below = (*lowest.end()).min(LOW as u64 - 1);
            (*lowest.start()..=below).for_each(|place| self.low[index(place)] |= bit(place));
        }
        true
    }

    /// True if the page of this place at the lowest level exists.
    fn is_known(&self, place: u64) -> bool {
        match self.low.get(index(place)) {
            Some(bits) => bits & bit(place) != 0,
            None => self.levels[0].contains(&place),
        }
    }
}

/// Returns the numbers of the places that `[start, last]` touches.
fn place(start: u64, last: u64, level: u32) -> RangeInclusive<u64> {
    start >> level..=last >> level
}

fn index(place: u64) -> usize {
    usize::try_from(place / 64).unwrap_or(usize::MAX)
}

fn bit(place: u64) -> u64 {
    1 << (place % 64)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn known_place_needs_no_further_page() {
        let mut pages = TablePages::new(3);
        for _ in 0..10 {
            for at in [0, 0x1f_f000] {
                assert!(pages.touch(at, at + 0xfff));
            }
        }
        assert_eq!(pages.count, 3);
        assert!(!pages.touch(0x20_0000, 0x20_0fff), "a fourth page");
        assert!(!pages.touch(0, 0x20_0000), "only part of the range is known");
        assert!(pages.touch(0, 0x1f_ffff));
        assert_eq!(pages.count, 3);
    }

    #[test]
    fn each_level_counts_its_own_pages() {
        let mut pages = TablePages::new(u64::MAX);
        for (at, count) in [(0, 3), (1 << 21, 4), (1 << 30, 6), (1 << 39, 9), (u64::MAX - 0xfff, 12)] {
            assert!(pages.touch(at, at + 0xfff));
            assert_eq!(pages.count, count, "{at:#x}");
        }
        // Map all of the first 4 GiB with one call.
        assert!(pages.touch(0, (1 << 32) - 1));
        assert_eq!(pages.count, 12 + 2048 - 3 + 4 - 2);
        assert!(pages.low.iter().all(|bits| *bits == u64::MAX));
    }

    proptest! {
        /// For any order of mappings, each page-table page counts once and the maximum is never exceeded.
        #[test]
        fn counted_pages_match_a_set_of_places(
            ranges in prop::collection::vec((0u64..1 << 33, 0u64..1 << 24, prop::sample::select(vec![0, 1u64 << 39, 1 << 47])), 0..50),
            max in 0u64..60,
        ) {
            let mut pages = TablePages::new(max);
            let mut model = BTreeSet::new();
            for (start, len, base) in ranges {
                let (start, last) = (base + start, base + start + len);
                let mut with = model.clone();
                with.extend(LEVELS.iter().flat_map(|level| place(start, last, *level).map(move |place| (*level, place))));
                let fits = with.len() as u64 <= max;
                prop_assert_eq!(pages.touch(start, last), fits);
                if fits {
                    model = with;
                }
                prop_assert_eq!(pages.count, model.len() as u64);
            }
        }
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Properties in PROBE replies: the IOVAs that a driver must not map.

use std::ops::RangeInclusive;

use rangemap::RangeInclusiveSet;

use crate::wire::ReservedMemory;

/// Returns the reserved ranges of an endpoint: at most `room` ranges, disjoint and in order. `room` must be at least 3.
///
/// `usable` contains the IOVAs of `input` that the endpoint can map, without `msi`. If an endpoint has more than `room` reserved ranges,
/// the two neighbours with the smallest gap are merged, until `room` ranges are left. The driver then leaves the usable IOVAs in these gaps
/// unused.
pub(crate) fn reserved(
    input: &RangeInclusive<u64>,
    usable: &[RangeInclusive<u64>],
    msi: &RangeInclusive<u64>,
    aperture: Option<&RangeInclusive<u64>>,
    room: usize,
) -> Vec<ReservedMemory> {
    let mappable: RangeInclusiveSet<u64> = usable.iter().cloned().collect();
    let mut holes: RangeInclusiveSet<u64> = mappable.gaps(input).collect();
    holes.extend(aperture.cloned());
    holes.remove(msi.clone());
    let mut properties: Vec<_> = holes.iter().map(|hole| property(hole, false)).collect();
    properties.push(property(msi, true));
    properties.sort_unstable_by_key(|property| property.start);
    while properties.len() > room && merge_closest(&mut properties) {}
    properties
}

fn property(range: &RangeInclusive<u64>, msi: bool) -> ReservedMemory {
    ReservedMemory { start: *range.start(), last: *range.end(), msi }
}

/// Merges the two reserved ranges with the smallest gap between them. The MSI window is never merged. Returns `false` if no two
/// ranges can be merged.
fn merge_closest(properties: &mut Vec<ReservedMemory>) -> bool {
    let closest = properties
        .windows(2)
        .enumerate()
        .filter(|(_, pair)| pair.iter().all(|property| !property.msi))
        .min_by_key(|(_, pair)| pair[1].start - pair[0].last);
    let Some((place, _)) = closest else {
        return false;
    };
    properties[place].last = properties[place + 1].last;
    properties.remove(place + 1);
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    const MSI: RangeInclusive<u64> = 0x500..=0x5ff;

    fn ranges(
        usable: &[RangeInclusive<u64>],
        aperture: Option<RangeInclusive<u64>>,
        room: usize,
    ) -> Vec<(u64, u64, bool)> {
        reserved(&(0x100..=0xfff), usable, &MSI, aperture.as_ref(), room)
            .into_iter()
            .map(|memory| (memory.start, memory.last, memory.msi))
            .collect()
    }

    #[test]
    fn aperture_joins_the_hole_beside_it() {
        let usable = [0x200..=0x4ff, 0x600..=0xfff];
        let found = ranges(&usable, Some(0x200..=0x2ff), 21);
        assert_eq!(found, [(0x100, 0x2ff, false), (0x500, 0x5ff, true)]);
    }

    #[test]
    fn hole_around_the_msi_window_is_split_by_it() {
        let found = ranges(&[0x100..=0x3ff, 0x700..=0xfff], None, 21);
        let expected = [(0x400, 0x4ff, false), (0x500, 0x5ff, true), (0x600, 0x6ff, false)];
        assert_eq!(found, expected);
    }

    #[test]
    fn closest_ranges_merge_first_but_not_across_the_msi_window() {
        // The ranges between the usable ranges start at 0x100, 0x300, 0x380 and 0x610. The ranges at 0x300 and 0x380 are closest to each
        // other. The MSI window lies between the ranges at 0x380 and 0x610.
        let usable = [0x110..=0x2ff, 0x310..=0x37f, 0x390..=0x4ff, 0x600..=0x60f, 0x620..=0xfff];
        assert_eq!(ranges(&usable, None, 21).len(), 5);
        let msi = (0x500, 0x5ff, true);
        let last = (0x610, 0x61f, false);
        let four = [(0x100, 0x10f, false), (0x300, 0x38f, false), msi, last];
        assert_eq!(ranges(&usable, None, 4), four);
        assert_eq!(ranges(&usable, None, 3), [(0x100, 0x38f, false), msi, last]);
    }

    #[test]
    fn full_address_range_does_not_overflow() {
        let found = reserved(&(0..=u64::MAX), &[0x1000..=0x1fff], &MSI, None, 21);
        assert_eq!(found.len(), 4);
        assert_eq!(found[3].last, u64::MAX);
    }
}

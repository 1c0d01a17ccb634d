// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What PROBE reports: the IOVAs that a driver must leave alone.

use std::ops::RangeInclusive;

use rangemap::RangeInclusiveSet;

use crate::wire::ReservedMemory;

/// The reserved ranges of an endpoint, at most `room` of them (at least 3), disjoint and in order.
///
/// `usable` is what the endpoint can map of `input`, without `msi`. If there are more ranges than room, neighbours
/// become one, those closest to each other first: the driver then leaves some IOVAs unused that it could use.
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

/// Makes the two reserved ranges one that have the smallest gap between them. The MSI window stays what it is. `false`
/// if there are no two that can be one.
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

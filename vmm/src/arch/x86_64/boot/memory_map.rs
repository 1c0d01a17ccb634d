// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Memory map for the kernel (types of ACPI's system address map, "E820").

use crate::arch::layout::{HIGH_RAM_START, LOW_RAM_END, PCI_ECAM, PCI_ECAM_MAX_SIZE, ram_ranges};

/// Usable memory.
pub(super) const RAM: u32 = 1;
/// Reserved memory.
pub(super) const RESERVED: u32 = 2;

/// Range of the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    /// First guest-physical address.
    pub(super) start: u64,
    /// Size in bytes.
    pub(super) size: u64,
    /// [`RAM`] or [`RESERVED`].
    pub(super) kind: u32,
}

/// Returns the map of a VM with `ram_size` bytes of RAM. The map reserves the ECAM region for the maximum number of segments, because Linux
/// does not use an ECAM region that is not reserved.
pub(super) fn build(ram_size: u64) -> Vec<Range> {
    let mut map = vec![
        Range { start: 0, size: LOW_RAM_END, kind: RAM },
        Range { start: LOW_RAM_END, size: HIGH_RAM_START - LOW_RAM_END, kind: RESERVED },
    ];
    for (start, size) in ram_ranges(ram_size) {
        let skip = HIGH_RAM_START.saturating_sub(start);
        map.push(Range { start: start + skip, size: size - skip, kind: RAM });
    }
    map.push(Range { start: PCI_ECAM, size: PCI_ECAM_MAX_SIZE, kind: RESERVED });
    map.sort_by_key(|range| range.start);
    map
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::layout::GIB;

    #[test]
    fn ranges_are_sorted_disjoint_and_omit_only_the_legacy_hole() {
        for size in [GIB / 2, 3 * GIB, 8 * GIB] {
            let map = build(size);
            assert!(map.windows(2).all(|pair| pair[0].start + pair[0].size <= pair[1].start), "{map:x?}");
            let ram: u64 = map.iter().filter(|range| range.kind == RAM).map(|range| range.size).sum();
            assert_eq!(ram, size - (HIGH_RAM_START - LOW_RAM_END));
        }
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! PCI segments: their slots for devices, the addresses of their BARs, and the interrupt lines of their INTx.

use std::ops::RangeInclusive;

use carom_api::VmConfig;
use carom_api::limits::{GIB, MIB, Slots};
use devices::acpi::memory_devices;
use devices::pci::{BarWindows, PciAddress};

use super::layout::{INTX_IRQS, LAST_SLOT, MEMORY_DEVICE_PORTS, PAGE_SIZE, PCI_IO, PciHole, pci_hotplug_ports};

/// Last slot behind the virtio-iommu, on segments that are only partly behind it. The ACPI tables list all slots behind the virtio-iommu
/// at boot, so that devices can be hot-plugged into these slots later.
const LAST_BEHIND_IOMMU: u8 = 17;
/// Last device number on a bus.
const LAST: u8 = LAST_SLOT;

/// Returns the first slot for devices of a segment. Device 0 is the host bridge. On segment 0, device 1 is the virtio-iommu.
const fn first(segment: u16) -> u8 {
    if segment == 0 { 2 } else { 1 }
}

/// Returns the slots for devices of a segment.
pub const fn slots(segment: u16) -> RangeInclusive<u8> {
    first(segment)..=LAST
}

/// Returns the slots behind the virtio-iommu, for a VM with a virtio-iommu. `all` is true if the whole segment is behind it.
pub const fn slots_behind_iommu(segment: u16, all: bool) -> RangeInclusive<u8> {
    first(segment)..=if all { LAST } else { LAST_BEHIND_IOMMU }
}

/// Returns the slots that are not behind the virtio-iommu, for a VM with a virtio-iommu.
pub const fn slots_beside_iommu(all: bool) -> RangeInclusive<u8> {
    let last = if all { LAST } else { LAST_BEHIND_IOMMU };
    last + 1..=LAST
}

/// Returns the slot of pvpanic.
pub const fn pvpanic_slot() -> u8 {
    LAST
}

/// Returns the slot of the watchdog.
pub const fn watchdog_slot(config: &VmConfig) -> u8 {
    if config.pvpanic { LAST - 1 } else { LAST }
}

/// Returns the interrupt line of a slot's INTx. Neighbouring slots have different lines.
pub fn intx_irq(slot: PciAddress) -> u32 {
    let lines = INTX_IRQS.end() - INTX_IRQS.start() + 1;
    INTX_IRQS.start() + (u32::from(slot.segment) + u32::from(slot.device)) % lines
}

/// Returns a range of functions for each segment: the functions that the ACPI tables list as behind the virtio-iommu.
pub fn endpoints(config: &VmConfig) -> Vec<RangeInclusive<PciAddress>> {
    let of = |segment| {
        let (first, mut last) =
            slots_behind_iommu(segment, config.platform.iommu_segments.contains(&segment)).into_inner();
        if segment == 0 {
            // pvpanic and the watchdog are left out, because they do no DMA.
            last = last.min(LAST - u8::from(config.pvpanic) - u8::from(config.watchdog));
        }
        PciAddress::on_segment(segment, first)..=PciAddress::on_segment(segment, last)
    };
    (0..config.platform.num_pci_segments).map(of).collect()
}

/// Returns the addresses for BARs of each segment. `mem64` is the range above 4 GiB for all segments.
pub fn windows(config: &VmConfig, mem64: &RangeInclusive<u64>) -> Vec<BarWindows> {
    let mut weights = vec![(1, 1); config.platform.num_pci_segments.into()];
    for segment in &config.pci_segments {
        if let Some(weight) = weights.get_mut(usize::from(segment.pci_segment)) {
            *weight = (segment.mmio32_aperture_weight, segment.mmio64_aperture_weight);
        }
    }
    let PciHole { mem32, .. } = PciHole::of(config.payload.firmware.is_some());
    let even = vec![1; weights.len()];
    let (of_mem32, of_mem64): (Vec<u32>, Vec<u32>) = weights.into_iter().unzip();
    let parts = divide(&PCI_IO, &even).into_iter().zip(divide(&mem32, &of_mem32)).zip(divide(mem64, &of_mem64));
    parts.map(|((io, mem32), mem64)| BarWindows { io, mem32, mem64 }).collect()
}

/// Divides `range` into one part for each weight, in the order of `weights`. The length of a part is proportional to its weight.
fn divide(range: &RangeInclusive<u64>, weights: &[u32]) -> Vec<RangeInclusive<u64>> {
    let (start, len) = (*range.start(), u128::from(range.end() - range.start()) + 1);
    let sum: u128 = weights.iter().map(|weight| u128::from(*weight)).sum();
    let part = |weight: u128| u64::try_from(len * weight / sum.max(1)).unwrap_or(u64::MAX);
    let least = part(weights.iter().copied().min().unwrap_or(1).into());
    // Boundaries of parts are multiples of the largest unit that leaves no part empty, because BARs are aligned to their sizes.
    let unit = [4 * GIB, MIB, PAGE_SIZE].into_iter().find(|unit| least >= *unit).unwrap_or(0x100);
    let (mut next, mut done) = (start, 0);
    let mut parts = Vec::with_capacity(weights.len());
    for (place, weight) in weights.iter().enumerate() {
        done += u128::from(*weight);
        let last = if place + 1 == weights.len() { *range.end() } else { (start + part(done)) / unit * unit - 1 };
        parts.push(next..=last);
        next = last.saturating_add(1);
    }
    parts
}

/// Returns the number of slots.
const fn count(slots: &RangeInclusive<u8>) -> usize {
    (*slots.end() + 1 - *slots.start()) as usize
}

// A validated configuration fits into these slots.
const _: () = {
    let mut segment = 0;
    while segment < 2 {
        let limits = Slots::of(segment);
        assert!(limits.all == count(&slots(segment)) && limits.all == count(&slots_behind_iommu(segment, true)));
        assert!(limits.behind_iommu == count(&slots_behind_iommu(segment, false)));
        assert!(limits.beside_iommu == count(&slots_beside_iommu(false)));
        segment += 1;
    }
    assert!(MEMORY_DEVICE_PORTS + memory_devices::REGISTERS_LEN <= pci_hotplug_ports(1));
};

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn config(json: &str) -> VmConfig {
        serde_json::from_str(&format!(r#"{{"payload": {{"kernel": "/k"}}, {json}}}"#)).unwrap()
    }

    #[test]
    fn segments_divide_bar_addresses_by_weight() {
        let mem64 = 64 * GIB..=1024 * GIB - 1;
        let one = windows(&config(r#""pvpanic": true"#), &mem64);
        assert_eq!(one.len(), 1);
        assert_eq!((&one[0].io, &one[0].mem32, &one[0].mem64), (&PCI_IO, &PciHole::of(false).mem32, &mem64));
        let two = config(
            r#""platform": {"num_pci_segments": 2},
               "pci_segments": [{"pci_segment": 1, "mmio32_aperture_weight": 3, "mmio64_aperture_weight": 2}]"#,
        );
        let two = windows(&two, &mem64);
        assert_eq!((&two[0].io, &two[1].io), (&(0x1000..=0x7fff), &(0x8000..=0xffff)));
        assert_eq!((&two[0].mem32, &two[1].mem32), (&(0xe000_0000..=0xe5ff_ffff), &(0xe600_0000..=0xf7ff_ffff)));
        assert_eq!((&two[0].mem64, &two[1].mem64), (&(64 * GIB..=384 * GIB - 1), &(384 * GIB..=1024 * GIB - 1)));
    }

    #[test]
    fn iommu_segment_is_completely_behind_the_iommu() {
        let config = config(r#""pvpanic": true, "platform": {"num_pci_segments": 3, "iommu_segments": [0, 2]}"#);
        let ends: Vec<_> = endpoints(&config).iter().map(|range| (*range.start(), *range.end())).collect();
        let at = PciAddress::on_segment;
        assert_eq!(ends, [(at(0, 2), at(0, 30)), (at(1, 1), at(1, 17)), (at(2, 1), at(2, 31))]);
        assert!(slots_beside_iommu(true).is_empty());
        for (devices, last, watchdog) in [(r#""pvpanic": true, "#, 29, 30), ("", 30, 31)] {
            let text = format!(r#"{devices}"watchdog": true, "platform": {{"iommu_segments": [0]}}"#);
            let config = self::config(&text);
            assert_eq!((*endpoints(&config)[0].end(), watchdog_slot(&config)), (at(0, last), watchdog));
        }
    }

    proptest! {
        #[test]
        fn parts_are_adjacent_and_not_empty(
            weights in prop::collection::vec(1u32..=1024, 1..=16),
            start in (1u64..1 << 40).prop_map(|pages| pages * PAGE_SIZE),
            len in GIB..1 << 46,
        ) {
            for range in [start..=start + len, PciHole::of(false).mem32] {
                let parts = divide(&range, &weights);
                prop_assert_eq!(parts.len(), weights.len());
                prop_assert_eq!((*parts[0].start(), *parts[parts.len() - 1].end()), (*range.start(), *range.end()));
                prop_assert!(parts.iter().all(|part| !part.is_empty()));
                prop_assert!(parts.windows(2).all(|pair| *pair[0].end() + 1 == *pair[1].start()));
            }
        }
    }
}

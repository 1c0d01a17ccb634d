// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guest RAM and device memory for the engine.

use std::sync::Arc;

use iommu_bounce::{GuestRam, Permissions, ThenDevice};
use vm_memory::{Address, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, VolatileSlice};

use crate::guest_visible::GuestVisibleMemory;
use crate::ram::Ram;

/// Guest RAM, and guest-visible device memory.
pub struct RamView {
    ram: Arc<Ram>,
    devices: Option<Arc<GuestVisibleMemory>>,
    mmio: bool,
}

impl RamView {
    /// Returns a view of `memory` and of the slots in `devices`. If `mmio` is true and `devices` is set, the virtio-iommu offers the `MMIO`
    /// feature.
    pub fn new(memory: Arc<Ram>, devices: Option<Arc<GuestVisibleMemory>>, mmio: bool) -> Self {
        Self { ram: memory, devices, mmio }
    }

    /// Returns the memory at `[gpa, gpa + len)`, cut off at the end of the region that contains `gpa`.
    fn part(&self, gpa: u64, len: u64) -> Option<VolatileSlice<'_>> {
        let gpa = GuestAddress(gpa);
        let region = self.ram.find_region(gpa)?;
        let offset = region.to_region_addr(gpa)?;
        let len = len.min(region.len().checked_sub(offset.raw_value())?);
        region.get_slice(offset, usize::try_from(len).ok()?).ok()
    }
}

impl GuestRam for RamView {
    fn slice(&self, gpa: u64, len: u64) -> Option<VolatileSlice<'_>> {
        self.part(gpa, len).filter(|part| part.len() as u64 == len)
    }

    fn regions(&self) -> Vec<(u64, u64)> {
        self.ram.iter().map(|region| (region.start_addr().raw_value(), region.len())).collect()
    }

    fn prefix(&self, gpa: u64, len: u64) -> Option<VolatileSlice<'_>> {
        self.part(gpa, len)
    }

    fn offers_mmio(&self) -> bool {
        self.mmio && self.devices.is_some()
    }

    fn device(&self, gpa: u64, len: u64, permissions: Permissions, then: ThenDevice<'_>) {
        if let Some(devices) = &self.devices {
            devices.with(gpa, len, permissions, then);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view() -> RamView {
        let ranges = [(GuestAddress(0), 0x4000), (GuestAddress(0x4000), 0x4000), (GuestAddress(0x10000), 0x1000)];
        RamView::new(Arc::new(Ram::from_ranges(&ranges).unwrap()), None, false)
    }

    #[test]
    fn range_within_a_region_is_one_slice() {
        let view = view();
        assert_eq!(view.slice(0x1000, 0x3000).unwrap().len(), 0x3000);
        assert_eq!(view.slice(0x10000, 0x1000).unwrap().len(), 0x1000);
    }

    #[test]
    fn range_over_two_regions_has_only_a_prefix() {
        let view = view();
        assert!(view.slice(0x3000, 0x2000).is_none());
        assert_eq!(view.prefix(0x3000, 0x2000).unwrap().len(), 0x1000);
        assert_eq!(view.prefix(0x4000, 0x1000).unwrap().len(), 0x1000);
    }

    #[test]
    fn all_regions_are_listed() {
        assert_eq!(view().regions(), [(0, 0x4000), (0x4000, 0x4000), (0x10000, 0x1000)]);
    }

    #[test]
    fn range_outside_ram_has_neither_slice_nor_prefix() {
        let view = view();
        assert!(view.slice(0x8000, 0x1000).is_none());
        assert!(view.prefix(0x8000, 0x1000).is_none());
        assert!(view.slice(0x10000, 0x1001).is_none());
        assert!(view.slice(u64::MAX - 0xfff, 0x1000).is_none());
        assert!(view.prefix(u64::MAX, u64::MAX).is_none());
        assert!(view.slice(0, u64::MAX).is_none());
    }
}

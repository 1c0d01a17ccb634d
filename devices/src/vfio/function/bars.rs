// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! BARs of a passed-through function: the areas that the guest accesses directly, and their memory slots.

use std::io;
use std::sync::{Arc, Mutex};

use log::warn;

use super::bar_mapping::{BarMapping, BarSlot};
use super::direct_areas::direct_areas;
use super::examine::MsixCapability;
use super::host_function::HostFunction;
use crate::first_error::first_error;
use crate::pci::{Bar, BarKind};
use crate::platform::MemorySlots;
use crate::sync::lock;

/// Areas of a BAR that the guest sees.
#[derive(Default)]
struct VisibleAreas {
    /// Address of the BAR while its areas are visible.
    address: Option<u64>,
    slots: Vec<BarSlot>,
}

impl VisibleAreas {
    /// Removes all slots. A slot that cannot be removed stays in the list.
    fn close(&mut self) -> io::Result<()> {
        self.address = None;
        while let Some(slot) = self.slots.last_mut() {
            slot.hide()?;
            self.slots.pop();
        }
        Ok(())
    }
}

/// BAR of a passed-through function.
pub(crate) struct HostBar {
    bar: Bar,
    // This field is dropped before `mapped`, because the memory slots refer to the mappings.
    visible: Mutex<VisibleAreas>,
    /// Areas that the guest accesses without an exit, each with its offset in the BAR.
    mapped: Vec<(u64, Arc<BarMapping>)>,
}

impl HostBar {
    /// Maps the mappable areas of `bar`. Accesses to the rest of the BAR exit to the VMM. Accesses to the pages of the MSI-X table and of
    /// the MSI-X pending bits always exit, because Carom emulates the table and the pending bits.
    pub(crate) fn new(name: &str, host: &dyn HostFunction, bar: Bar, msix: Option<&MsixCapability>) -> Self {
        let mut mapped = Vec::new();
        if bar.kind != BarKind::Io {
            let region = host.region(bar.index);
            let trapped: Vec<_> = msix
                .into_iter()
                .flat_map(|msix| [&msix.table, &msix.pending])
                .filter(|place| place.bar == bar.index)
                .map(|place| place.range.clone())
                .collect();
            let direct = if region.readable { direct_areas(bar.size, &region.mappable, &trapped) } else { Vec::new() };
            for area in direct {
                let len = usize::try_from(area.end - area.start).unwrap_or(usize::MAX);
                match host.map_region(bar.index, area.start, len, !region.writable) {
                    Ok(mapping) => mapped.push((area.start, Arc::new(mapping))),
                    Err(error) => {
                        warn!(
                            "{name}: cannot map BAR {} at offset {:#x}, so each guest access to this part exits to the VMM: {error}",
                            bar.index, area.start
                        );
                    }
                }
            }
        }
        Self { bar, visible: Mutex::default(), mapped }
    }

    /// Returns the description of the BAR.
    pub(crate) fn bar(&self) -> Bar {
        self.bar
    }

    /// Makes the areas visible to the guest at `address`. Does nothing if the areas are already visible at `address`. On failure, this
    /// function hides all areas again, so that every access to the BAR exits. An area whose memory slot cannot be removed stays visible.
    pub(crate) fn show(&self, slots: &Arc<dyn MemorySlots>, address: u64) -> io::Result<()> {
        let mut visible = lock(&self.visible);
        if visible.address == Some(address) {
            return Ok(());
        }
        visible.close()?;
        for (offset, mapping) in &self.mapped {
            match BarSlot::new(slots, mapping, address + offset) {
                Ok(slot) => visible.slots.push(slot),
                Err(error) => {
                    visible.close()?;
                    return Err(error);
                }
            }
        }
        visible.address = Some(address);
        Ok(())
    }

    /// Blocks DMA of other devices to the areas, because the guest is about to turn off the decoding of the BAR.
    pub(crate) fn withhold(&self) -> io::Result<()> {
        first_error(lock(&self.visible).slots.iter().map(BarSlot::withhold))
    }

    /// Hides all areas from the guest.
    pub(crate) fn hide(&self) -> io::Result<()> {
        lock(&self.visible).close()
    }
}

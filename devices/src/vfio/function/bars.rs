// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! BARs of a passed-through function: what the guest reaches directly, and the memory slots for it.

use std::io;
use std::sync::{Arc, Mutex};

use log::warn;

use super::bar_mapping::{BarMapping, BarSlot};
use super::direct_areas::direct_areas;
use super::examine::MsixCapability;
use super::host_function::HostFunction;
use crate::pci::{Bar, BarKind};
use crate::platform::MemorySlots;
use crate::sync::lock;

/// Where the guest sees the pieces of a BAR.
#[derive(Default)]
struct Window {
    at: Option<u64>,
    shown: Vec<BarSlot>,
}

impl Window {
    /// Takes everything out of the guest's view; what fails to go is kept, so that it is not forgotten.
    fn close(&mut self) -> io::Result<()> {
        self.at = None;
        while let Some(shown) = self.shown.last_mut() {
            shown.hide()?;
            self.shown.pop();
        }
        Ok(())
    }
}

/// One BAR.
pub(crate) struct HostBar {
    bar: Bar,
    // Before the mappings, which it refers to.
    window: Mutex<Window>,
    /// Pieces that need no exit, by offset.
    mapped: Vec<(u64, Arc<BarMapping>)>,
}

impl HostBar {
    /// Maps what can be mapped of `bar`; the rest traps. The pages of the MSI-X table and its pending bits, which are
    /// emulated, always trap.
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
            for piece in direct {
                let len = usize::try_from(piece.end - piece.start).unwrap_or(usize::MAX);
                match host.map_region(bar.index, piece.start, len, !region.writable) {
                    Ok(mapping) => mapped.push((piece.start, Arc::new(mapping))),
                    Err(error) => {
                        warn!("{name}: accesses to BAR {} at {:#x} exit: {error}", bar.index, piece.start);
                    }
                }
            }
        }
        Self { bar, window: Mutex::default(), mapped }
    }

    /// The register.
    pub(crate) fn bar(&self) -> Bar {
        self.bar
    }

    /// Shows the pieces at `address`; nothing changes if they are there already. On failure nothing is shown, and the
    /// whole BAR traps.
    pub(crate) fn show(&self, slots: &Arc<dyn MemorySlots>, address: u64) -> io::Result<()> {
        let mut window = lock(&self.window);
        if window.at == Some(address) {
            return Ok(());
        }
        window.close()?;
        for (offset, mapping) in &self.mapped {
            match BarSlot::new(slots, mapping, address + offset) {
                Ok(shown) => window.shown.push(shown),
                Err(error) => {
                    window.close()?;
                    return Err(error);
                }
            }
        }
        window.at = Some(address);
        Ok(())
    }

    /// Has nobody but the guest reach the pieces, which are about to cease to answer.
    pub(crate) fn withhold(&self) -> io::Result<()> {
        lock(&self.window).shown.iter().try_for_each(BarSlot::withhold)
    }

    /// Takes all pieces out of the guest's view.
    pub(crate) fn hide(&self) -> io::Result<()> {
        lock(&self.window).close()
    }
}

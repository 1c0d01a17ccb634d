// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! RAM that comes while the guest runs.
//!
//! It lies behind what the guest was booted with, one piece behind the other. A piece is shown to the devices before the guest
//! learns of it, and is never taken away.

use std::ops::Range;

use carom_api::ConfigError;
use carom_api::config::MemoryConfig;
use carom_api::limits::MAX_MEMORY;
use carom_api::types::VmResize;
use devices::legacy::memory_devices::MemoryDevice;
use log::warn;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use super::Vm;
use crate::arch::layout::{GIB, MEMORY_DEVICE_GRANULE};
use crate::machine::VmError;
use crate::memory;

/// Where it goes.
pub(super) struct AddedRam {
    /// Guest-physical addresses that it may have.
    room: Range<u64>,
}

impl AddedRam {
    pub(super) fn new(room: Range<u64>) -> Self {
        Self { room }
    }
}

/// The guest-physical addresses of RAM that can come to a VM which was booted with `ram_size` bytes, whatever came already. The
/// last GiB of those that `physical_bits` reach is for BARs.
pub(super) fn room(config: &MemoryConfig, ram_size: u64, physical_bits: u8) -> Range<u64> {
    let end = memory::end(ram_size);
    let start = end.next_multiple_of(MEMORY_DEVICE_GRANULE);
    let more = config.hotplug_size.min(MAX_MEMORY.saturating_sub(ram_size));
    let last = ((1u64 << physical_bits) - GIB).min(start + more) & !(MEMORY_DEVICE_GRANULE - 1);
    if last > start { start..last } else { end..end }
}

impl Vm {
    /// Adds `len` bytes of RAM, a multiple of [`MEMORY_DEVICE_GRANULE`].
    pub(super) fn add_piece(&mut self, config: &MemoryConfig, len: u64) -> Result<(), VmError> {
        let refuse = |rule: String| Err(ConfigError::new(VmResize::DESIRED_RAM, rule).into());
        let Some(registers) = self.platform.memory_devices.clone() else {
            return refuse("the VM was booted without room for more (memory.hotplug_size)".into());
        };
        if registers.is_full() {
            return refuse(format!("it came in {} pieces already, which is the most", registers.devices().len()));
        }
        // A piece that a device did not take is there still, and the guest does not know of it.
        let known = registers.devices().last().map_or(self.added_ram.room.start, |last| last.gpa + last.len);
        let last = self.memory.last_addr().0 + 1;
        let spare = self.memory.iter().find(|region| region.start_addr().0 >= known && region.len() == len);
        let gpa = spare.map_or(known.max(last), |region| region.start_addr().0);
        if self.added_ram.room.end.saturating_sub(gpa) < len {
            let left = self.added_ram.room.end.saturating_sub(gpa);
            return refuse(format!("{len} bytes are wanted, and there are addresses for {left}"));
        }
        if spare.is_none() {
            let region = memory::region(config, gpa, len)?;
            self.memory.add(region).map_err(|error| VmError::MoreRam(error.to_string()))?;
        }
        let Some(region) = self.memory.iter().find(|region| region.start_addr().0 == gpa) else {
            return Err(VmError::MoreRam(format!("there is no region at {gpa:#x}")));
        };
        let slot = memory::show_region(region, &*self.slots)?;
        if let Err(error) = self.parts.add_ram(region) {
            if let Err(error) = self.slots.remove(slot) {
                warn!("RAM at {gpa:#x} that the guest does not get stays shown to it: {error}");
            }
            return Err(error);
        }
        registers.announce(MemoryDevice { gpa, len });
        Ok(())
    }

    /// Address and length of each piece.
    pub(super) fn added_ranges(&self) -> Vec<(u64, u64)> {
        let devices = self.platform.memory_devices.as_ref().map(|registers| registers.devices()).unwrap_or_default();
        devices.iter().map(|device| (device.gpa, device.len)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::layout::MIB;

    fn config(size: u64, hotplug_size: u64) -> MemoryConfig {
        MemoryConfig { hotplug_size, ..MemoryConfig::with_size(size) }
    }

    #[test]
    fn room_lies_behind_ram_and_below_the_last_addresses() {
        assert_eq!(room(&config(GIB, 2 * GIB), GIB, 40), 4 * GIB..6 * GIB);
        let odd = 3 * GIB + 2 * MIB;
        assert_eq!(room(&config(odd, GIB), odd, 40), 4 * GIB + 128 * MIB..5 * GIB + 128 * MIB);
        assert_eq!(room(&config(GIB, u64::MAX), GIB, 36), 4 * GIB..63 * GIB);
        assert_eq!(room(&config(GIB, u64::MAX), GIB, 46), 4 * GIB..4 * GIB + MAX_MEMORY - GIB);
    }

    #[test]
    fn vm_that_grew_has_the_room_that_it_had() {
        let room_of = |size| room(&config(size, 2 * GIB), GIB, 40);
        assert_eq!(room_of(2 * GIB), room_of(GIB));
    }

    #[test]
    fn vm_without_hot_plug_has_none() {
        assert!(room(&config(GIB, 0), GIB, 40).is_empty());
        assert!(room(&config(GIB, 127 * MIB), GIB, 40).is_empty());
        assert!(room(&config(62 * GIB, GIB), 62 * GIB, 36).is_empty());
    }
}

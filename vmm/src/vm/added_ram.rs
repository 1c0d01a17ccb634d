// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! RAM that is added while the guest runs.
//!
//! Each addition is one piece. The pieces lie above the RAM at boot, one after the other. The devices get access to a piece before the
//! guest is notified. After the notification, the piece is never removed. If a device rejects a piece, the piece is withdrawn. After the
//! withdrawal, only the piece's address range in this process stays reserved.

use std::ops::Range;

use carom_api::ConfigError;
use carom_api::config::MemoryConfig;
use carom_api::limits::MAX_MEMORY;
use carom_api::types::VmResize;
use devices::acpi::memory_devices::MemoryDevice;
use devices::platform::MemorySlots;
use devices::ram::{Ram, RamRegion};
use log::warn;
use vm_memory::GuestMemoryRegion;

use super::Vm;
use crate::arch::layout::{GIB, MEMORY_DEVICE_GRANULE, ram_end};
use crate::error::VmError;
use crate::memory;

/// Address range for RAM that is added after boot.
pub(super) struct AddedRam {
    /// Guest-physical addresses that added RAM may use.
    room: Range<u64>,
}

impl AddedRam {
    pub(super) fn new(room: Range<u64>) -> Self {
        Self { room }
    }
}

/// Returns the guest-physical addresses for RAM that is added to a VM, including pieces that were added already. The VM was booted with
/// `ram_size` bytes. The last GiB that `physical_bits` can address is kept for BARs.
pub(super) fn room(config: &MemoryConfig, ram_size: u64, physical_bits: u8) -> Range<u64> {
    let end = ram_end(ram_size);
    let start = end.next_multiple_of(MEMORY_DEVICE_GRANULE);
    let more = config.hotplug_size.min(MAX_MEMORY.saturating_sub(ram_size));
    let last = (1u64 << physical_bits).saturating_sub(GIB).min(start + more) & !(MEMORY_DEVICE_GRANULE - 1);
    if last > start { start..last } else { end..end }
}

/// Registers a region with KVM and gives it to the devices, which may reject it. On error, the guest does not have the region.
fn show(
    region: &RamRegion,
    slots: &dyn MemorySlots,
    give: impl FnOnce(&RamRegion) -> Result<(), VmError>,
) -> Result<(), VmError> {
    let slot = memory::show_region(region, slots)?;
    give(region).inspect_err(|_| {
        if let Err(error) = slots.remove(slot) {
            let gpa = region.start_addr().0;
            warn!("RAM at {gpa:#x} could not be added to a device, and cannot be removed from the guest: {error}");
        }
    })
}

/// Adds a piece to RAM, and gives the guest and the devices access to the piece. `give` passes the piece to the devices, which may reject
/// it. After a failure, `take` removes the piece from the devices. `take` returns `false` if the host keeps a mapping of the piece. In this
/// case, the pages of the piece stay allocated. Otherwise the pages are freed.
fn add_to(
    ram: &Ram,
    config: &MemoryConfig,
    piece: MemoryDevice,
    slots: &dyn MemorySlots,
    give: impl FnOnce(&RamRegion) -> Result<(), VmError>,
    take: impl FnOnce(&RamRegion) -> bool,
) -> Result<(), VmError> {
    // Add the piece to RAM first, because devices look up the piece by its address. A device looks up the piece when it receives the piece,
    // or when a driver starts the device meanwhile.
    let region = memory::add(ram, config, piece.gpa, piece.len)?;
    show(region, slots, give).inspect_err(|_| {
        // Withdraw the piece first, so that no device finds it any more. Then take it from the devices, and free its pages.
        ram.withdraw(region.start_addr());
        if take(region) {
            memory::give_up(region);
        } else {
            // A device may still write to the pages. If the pages were freed, the host could give them to another process.
            warn!(
                "RAM at {:#x} could not be added, but its pages stay allocated: a device may still access them",
                region.start_addr().0
            );
        }
    })
}

impl Vm {
    /// Adds `len` bytes of RAM, a multiple of [`MEMORY_DEVICE_GRANULE`].
    pub(super) fn add_piece(&mut self, config: &MemoryConfig, len: u64) -> Result<(), VmError> {
        let refuse = |rule: String| Err(ConfigError::new(VmResize::DESIRED_RAM, rule).into());
        let Some(registers) = self.board.memory_devices.clone() else {
            return refuse("the VM was booted without room for more RAM: set memory.hotplug_size before boot".into());
        };
        if registers.is_full() {
            return refuse(format!(
                "RAM was already added {} times, the maximum for one boot of the VM: shut the VM down, and boot it again first",
                registers.devices().len()
            ));
        }
        let gpa = registers.devices().last().map_or(self.added_ram.room.start, |last| last.gpa + last.len);
        if self.added_ram.room.end.saturating_sub(gpa) < len {
            let left = self.added_ram.room.end.saturating_sub(gpa);
            return refuse(format!(
                "cannot add {len} bytes: the guest-physical addresses for added RAM have room for only {left} bytes"
            ));
        }
        let (piece, parts) = (MemoryDevice { gpa, len }, &self.parts);
        let take = |region: &RamRegion| parts.take_ram(region);
        add_to(&self.memory, config, piece, &*self.slots, |region| parts.add_ram(region), take)?;
        registers.announce(piece);
        Ok(())
    }

    /// Returns the address and length of each piece.
    pub(super) fn added_ranges(&self) -> Vec<(u64, u64)> {
        let devices = self.board.memory_devices.as_ref().map(|registers| registers.devices()).unwrap_or_default();
        devices.iter().map(|device| (device.gpa, device.len)).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeMap;
    use std::fs::File;
    use std::io;
    use std::os::unix::fs::{FileExt, MetadataExt};
    use std::sync::{Arc, Mutex};

    use devices::platform::HostRange;
    use devices::virtio::iommu::RamView;
    use iommu_bounce::test_utils::{RecordingMapper, attach, map};
    use iommu_bounce::{Engine, EngineConfig};
    use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

    use super::*;
    use crate::arch::layout::MIB;

    fn config(size: u64, hotplug_size: u64) -> MemoryConfig {
        MemoryConfig { hotplug_size, ..MemoryConfig::with_size(size) }
    }

    #[test]
    fn room_lies_above_ram_and_below_the_last_addresses() {
        assert_eq!(room(&config(GIB, 2 * GIB), GIB, 40), 4 * GIB..6 * GIB);
        let odd = 3 * GIB + 2 * MIB;
        assert_eq!(room(&config(odd, GIB), odd, 40), 4 * GIB + 128 * MIB..5 * GIB + 128 * MIB);
        assert_eq!(room(&config(GIB, u64::MAX), GIB, 36), 4 * GIB..63 * GIB);
        assert_eq!(room(&config(GIB, u64::MAX), GIB, 46), 4 * GIB..4 * GIB + MAX_MEMORY - GIB);
    }

    #[test]
    fn vm_with_added_ram_keeps_its_room() {
        let room_of = |size| room(&config(size, 2 * GIB), GIB, 40);
        assert_eq!(room_of(2 * GIB), room_of(GIB));
    }

    /// Memory slots by number, with address and length. If `full` is set, no slot is available.
    #[derive(Default)]
    struct Slots {
        used: Mutex<BTreeMap<u32, (u64, usize)>>,
        full: bool,
    }

    impl MemorySlots for Slots {
        unsafe fn insert(&self, gpa: u64, host: HostRange, _: bool) -> io::Result<u32> {
            if self.full {
                return Err(io::ErrorKind::QuotaExceeded.into());
            }
            let mut used = self.used.lock().unwrap();
            let slot = u32::try_from(used.len()).unwrap();
            used.insert(slot, (gpa, host.len));
            Ok(slot)
        }

        fn remove(&self, slot: u32) -> io::Result<()> {
            self.used.lock().unwrap().remove(&slot);
            Ok(())
        }
    }

    const START: u64 = 4 * GIB;

    /// Adds a piece of `mib` MiB. The devices access the piece, and then reject it if `refused` is set.
    fn add(ram: &Ram, config: &MemoryConfig, slots: &Slots, mib: u64, refused: bool) -> Result<(), VmError> {
        let piece = MemoryDevice { gpa: START, len: mib * MIB };
        let give = |region: &RamRegion| {
            assert_eq!(ram.find_region(GuestAddress(START)).unwrap().len(), region.len());
            ram.write_obj(7u8, GuestAddress(START)).unwrap();
            if refused { Err(VmError::MoreRam("refused".into())) } else { Ok(()) }
        };
        let take = |region: &RamRegion| {
            assert_eq!(region.len(), mib * MIB);
            assert!(ram.find_region(GuestAddress(START)).is_none(), "a device that starts now does not find the piece");
            true
        };
        add_to(ram, config, piece, slots, give, take)
    }

    /// Returns the allocated bytes of a region's file or private memory. /proc/self/smaps cannot be used, because the kernel may have
    /// merged the mapping with its neighbours.
    fn taken(region: &RamRegion) -> u64 {
        if let Some(file) = region.file_offset() {
            return file.file().metadata().unwrap().blocks() * 512;
        }
        let mut entries = vec![0; usize::try_from(region.len() / 4096 * 8).unwrap()];
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        pagemap.read_exact_at(&mut entries, region.as_ptr() as u64 / 4096 * 8).unwrap();
        // Bit 63: the page is present.
        entries.chunks(8).filter(|entry| entry[7] & 0x80 != 0).count() as u64 * 4096
    }

    #[test]
    fn refused_ram_piece_frees_its_gpa_range_and_host_memory() {
        for (shared, prefault) in [(false, false), (true, false), (false, true), (true, true)] {
            let config = MemoryConfig { shared, prefault, ..config(32 * MIB, GIB) };
            let (ram, slots) = (memory::create(&config).unwrap(), Slots::default());
            for mib in [48, 32, 48] {
                add(&ram, &config, &slots, mib, true).unwrap_err();
                assert_eq!((ram.num_regions(), slots.used.lock().unwrap().len()), (1, 0));
                let region = ram.withdrawn(GuestAddress(START), mib * MIB).unwrap();
                assert_eq!(taken(region), 0, "shared {shared}, prefault {prefault}");
            }
            // Adding a piece at the same address succeeds now.
            add(&ram, &config, &slots, 32, false).unwrap();
            let region = ram.iter().last().unwrap();
            assert_eq!((region.start_addr().0, region.len()), (START, 32 * MIB));
            assert_eq!(taken(region) == 32 * MIB, prefault, "{}", taken(region));
            assert_eq!(slots.used.lock().unwrap().values().copied().collect::<Vec<_>>(), [(START, 32 << 20)]);
        }
    }

    #[test]
    fn ram_piece_without_a_free_slot_is_refused_and_replaceable() {
        let config = config(32 * MIB, GIB);
        let ram = memory::create(&config).unwrap();
        let full = Slots { full: true, ..Slots::default() };
        assert!(matches!(add(&ram, &config, &full, 48, false), Err(VmError::Memory(_))));
        add(&ram, &config, &Slots::default(), 32, false).unwrap();
        assert_eq!(ram.iter().last().unwrap().len(), 32 * MIB);
    }

    #[test]
    fn refused_ram_piece_keeps_pages_that_an_endpoint_reaches() {
        let config = config(32 * MIB, GIB);
        let (ram, slots, mapper) = (memory::create(&config).unwrap(), Slots::default(), RecordingMapper::new());
        let (probe, view) = (mapper.probe(), Arc::new(RamView::new(ram.clone(), None, false)));
        let mut engine = Engine::new(EngineConfig::default(), view, None).unwrap();
        engine.add_endpoint(1, Box::new(mapper)).unwrap();
        engine.accept_features(u64::MAX);
        let engine = RefCell::new(engine);
        for host_refuses in [true, false] {
            let give = |region: &RamRegion| {
                for request in [attach(1, 1), map(1, 0, region.len() - 1, START, 3)] {
                    let mut reply = [0xff; 4];
                    engine.borrow_mut().handle(&request, &mut reply);
                    assert_eq!(reply, [0; 4]);
                }
                ram.write_obj(7u8, GuestAddress(START)).unwrap();
                probe.refuse_unmaps(host_refuses);
                Err(VmError::MoreRam("refused".into()))
            };
            let take = |region: &RamRegion| engine.borrow_mut().take_ram(START, region.len());
            add_to(&ram, &config, MemoryDevice { gpa: START, len: 32 * MIB }, &slots, give, take).unwrap_err();
            let pages = taken(ram.withdrawn(GuestAddress(START), 32 * MIB).unwrap());
            assert_eq!((probe.is_empty(), pages == 0), (!host_refuses, !host_refuses), "{pages} bytes");
            probe.refuse_unmaps(false);
        }
    }

    #[test]
    fn vm_without_hotplug_has_no_room_for_ram() {
        assert!(room(&config(GIB, 0), GIB, 40).is_empty());
        assert!(room(&config(GIB, 127 * MIB), GIB, 40).is_empty());
        assert!(room(&config(62 * GIB, GIB), 62 * GIB, 36).is_empty());
    }

    #[test]
    fn narrow_physical_addresses_leave_no_room_for_more_ram() {
        for bits in [0, 8, 29, 30, 32] {
            assert!(room(&config(GIB, GIB), GIB, bits).is_empty(), "{bits} bits");
        }
    }
}

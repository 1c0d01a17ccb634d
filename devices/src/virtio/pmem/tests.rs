// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The device behind its transport, with a driver that the tests play.

use std::fs::{self, File};
use std::sync::Arc;
use std::time::{Duration, Instant};

use iommu_bounce::{DmaMapper, Permissions};
use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::spec::{DEVICE_TYPE, GRANULE};
use super::{PmemParams, VirtioPmem, create};
use crate::dma::{DeviceMemory, DmaTable, TableMapper, fault_relay};
use crate::pci::PciDevice;
use crate::pci::regs::{COMMAND, COMMAND_BUS_MASTER, COMMAND_IO, COMMAND_MEMORY};
use crate::ram::Ram;
use crate::virtio::test_support::{FakeMsi, FakeSlots, SOON, set_bus_master};
use crate::virtio::{VirtioDevice, VirtioPciDevice};

const ACCESS_PLATFORM: u32 = 1 << 1;
const VERSION_1: u32 = 1 << 0;
const RINGS: [u64; 3] = [0x1000, 0x2000, 0x3000];
/// The request, and behind it its answer.
const REQUEST: u64 = 0x4000;
const ANSWER: u64 = 0x4800;
/// How far IOVAs are from guest-physical addresses where the device is behind an IOMMU.
const OFFSET: u64 = 0x1000_0000;
/// Where the memory is shown.
const PLACE: u64 = 0x10_0000_0000;
const NEXT: u16 = 1;
const WRITE: u16 = 2;

struct Harness {
    dir: tempfile::TempDir,
    ram: Arc<Ram>,
    slots: Arc<FakeSlots>,
    function: Arc<VirtioPciDevice>,
    device: Arc<VirtioPmem>,
    mapper: Option<TableMapper>,
}

impl Harness {
    fn new(discard_writes: bool, translated: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("memory");
        File::create(&path).unwrap().set_len(GRANULE).unwrap();
        let file = File::options().read(true).write(!discard_writes).open(&path).unwrap();
        let ram = Arc::new(Ram::from_ranges(&[(GuestAddress(0), 0x1_0000)]).unwrap());
        let (sender, _) = fault_relay();
        let table = translated.then(|| Arc::new(DmaTable::new("pmem", ram.clone(), Some((8, sender)))));
        let memory = table.clone().map_or_else(|| DeviceMemory::all_ram(ram.clone()), DeviceMemory::mapped);
        let slots = Arc::new(FakeSlots::default());
        let params = PmemParams {
            id: "_pmem0".into(),
            file,
            path: path.display().to_string(),
            size: GRANULE,
            discard_writes,
            slots: slots.clone(),
            memory,
            msi: Arc::new(FakeMsi::default()),
            doorbells: None,
            observer: None,
        };
        let (function, device) = create(params).unwrap();
        let command = COMMAND_BUS_MASTER | COMMAND_MEMORY | COMMAND_IO;
        function.write_config(COMMAND, &command.to_le_bytes());
        function.bar_moved(2, PLACE).unwrap();
        Self { dir, ram, slots, function, device, mapper: table.map(TableMapper::new) }
    }

    fn offset(&self) -> u64 {
        if self.mapper.is_some() { OFFSET } else { 0 }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.function.write_bar(0, offset, data);
    }

    fn status(&self) -> u8 {
        let mut status = [0];
        self.function.read_bar(0, 20, &mut status);
        status[0]
    }

    fn start(&mut self) {
        for page in [RINGS[0], RINGS[1], RINGS[2], REQUEST] {
            let slice = self.ram.get_slice(GuestAddress(page), 0x1000).unwrap();
            if let Some(mapper) = &mut self.mapper {
                mapper.map(page + OFFSET, slice, Permissions::READ | Permissions::WRITE).unwrap();
            }
        }
        let high = VERSION_1 | if self.mapper.is_some() { ACCESS_PLATFORM } else { 0 };
        self.write(20, &[3]);
        self.write(8, &1u32.to_le_bytes());
        self.write(12, &high.to_le_bytes());
        self.write(20, &[11]);
        assert_eq!(self.status(), 11, "features are accepted");
        self.write(22, &0u16.to_le_bytes());
        self.write(24, &16u16.to_le_bytes());
        for (place, ring) in [32, 40, 48].into_iter().zip(RINGS) {
            self.write(place, &(ring + self.offset()).to_le_bytes());
        }
        self.write(28, &1u16.to_le_bytes());
        self.write(20, &[15]);
    }

    /// Puts a request of this kind into the empty queue.
    fn request(&self, kind: u32, parts: &[(u64, u32, u16)]) {
        self.ram.write_obj(kind, GuestAddress(REQUEST)).unwrap();
        self.ram.write_obj(0xffu32, GuestAddress(ANSWER)).unwrap();
        for (index, (address, len, flags)) in (0u16..).zip(parts) {
            let descriptor = RINGS[0] + 16 * u64::from(index);
            self.ram.write_obj(*address, GuestAddress(descriptor)).unwrap();
            self.ram.write_obj(*len, GuestAddress(descriptor + 8)).unwrap();
            self.ram.write_obj(*flags, GuestAddress(descriptor + 12)).unwrap();
            self.ram.write_obj(index + 1, GuestAddress(descriptor + 14)).unwrap();
        }
        self.ram.write_obj(1u16, GuestAddress(RINGS[1] + 2)).unwrap();
        self.function.write_bar(1, 0, &0u16.to_le_bytes());
    }

    fn used(&self) -> u16 {
        self.ram.read_obj(GuestAddress(RINGS[2] + 2)).unwrap()
    }

    fn answer(&self) -> u32 {
        wait_until(|| self.used() == 1);
        self.ram.read_obj(GuestAddress(ANSWER)).unwrap()
    }

    /// A request as Linux makes it.
    fn flush(&self, kind: u32) -> u32 {
        self.request(kind, &[(REQUEST + self.offset(), 4, NEXT), (ANSWER + self.offset(), 4, WRITE)]);
        self.answer()
    }

    fn first_byte(&self) -> u8 {
        fs::read(self.dir.path().join("memory")).unwrap()[0]
    }
}

fn wait_until(mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn file_is_the_guests_memory_and_a_flush_is_answered() {
    let mut harness = Harness::new(false, false);
    let mut id = [0; 4];
    harness.function.read_config(0, &mut id);
    assert_eq!(u32::from_le_bytes(id), (u32::from(DEVICE_TYPE) + 0x1040) << 16 | 0x1af4);
    let mut config = [0; 16];
    harness.function.read_bar(0, 0x2000, &mut config[..8]);
    harness.function.read_bar(0, 0x2008, &mut config[8..]);
    assert_eq!((&config[..8], &config[8..]), (&PLACE.to_le_bytes()[..], &GRANULE.to_le_bytes()[..]));
    harness.start();
    harness.slots.store(PLACE, 7);
    assert_eq!(harness.flush(0), 0);
    assert_eq!(harness.first_byte(), 7);
    let counters = harness.device.counters();
    assert_eq!((counters.flushes, counters.errors), (1, 0));
}

#[test]
fn device_behind_the_iommu_is_asked_through_what_is_mapped() {
    let mut harness = Harness::new(false, true);
    harness.start();
    assert_eq!(harness.flush(0), 0);
}

#[test]
fn request_is_not_answered_while_bus_mastering_is_off() {
    for translated in [false, true] {
        let mut harness = Harness::new(false, translated);
        harness.start();
        set_bus_master(&harness.function, false);
        let offset = harness.offset();
        harness.request(0, &[(REQUEST + offset, 4, NEXT), (ANSWER + offset, 4, WRITE)]);
        harness.device.notify(0).unwrap();
        std::thread::sleep(SOON);
        assert_eq!((harness.used(), harness.ram.read_obj::<u32>(GuestAddress(ANSWER)).unwrap()), (0, 0xff));
        set_bus_master(&harness.function, true);
        assert_eq!(harness.answer(), 0);
    }
}

#[test]
fn discarded_writes_do_not_reach_the_file_and_prevent_saving() {
    let mut harness = Harness::new(true, false);
    harness.start();
    harness.slots.store(PLACE + 4096, 7);
    harness.slots.store(PLACE, 7);
    assert_eq!(harness.flush(0), 0);
    assert_eq!((harness.slots.load(PLACE), harness.first_byte()), (7, 0));
    harness.function.pause();
    assert!(harness.function.save().is_err());
}

#[test]
fn unknown_requests_fail_and_malformed_ones_need_a_reset() {
    let mut harness = Harness::new(false, false);
    harness.start();
    assert_eq!(harness.flush(1), 1);
    for parts in [
        &[(REQUEST, 4, NEXT), (ANSWER, 3, WRITE)][..],
        &[(REQUEST, 3, NEXT), (ANSWER, 4, WRITE)],
        &[(ANSWER, 4, WRITE | NEXT), (REQUEST, 4, 0)],
        &[(1 << 40, 4, NEXT), (ANSWER, 4, WRITE)],
        &[(REQUEST, 4, NEXT), (1 << 40, 4, WRITE)],
        &[(REQUEST, 4, 0)],
    ] {
        let mut harness = Harness::new(false, false);
        harness.start();
        harness.request(0, parts);
        wait_until(|| harness.status() & 64 != 0);
        assert_eq!(harness.used(), 0);
    }
}

#[test]
fn memory_moves_with_its_bar_and_goes_with_it() {
    let harness = Harness::new(false, false);
    harness.slots.store(PLACE, 5);
    harness.function.bar_moved(2, 2 * PLACE).unwrap();
    assert_eq!((harness.slots.len(), harness.slots.load(2 * PLACE)), (1, 5));
    harness.function.bar_moved(2, 2 * PLACE).unwrap();
    harness.function.bar_released(2).unwrap();
    assert_eq!(harness.slots.len(), 0);
    harness.function.bar_moved(2, PLACE).unwrap();
    let Harness { slots, function, device, .. } = harness;
    drop((function, device));
    assert_eq!(slots.len(), 0);
}

#[test]
fn restored_device_is_the_one_that_was_saved_if_it_is_as_large() {
    let old = Harness::new(false, false);
    old.function.pause();
    let state = old.function.save().unwrap();
    let new = Harness::new(false, false);
    new.function.restore(&state).unwrap();
    assert_eq!(new.function.save().unwrap(), state);
    let text = serde_json::to_string(&state).unwrap();
    let other = text.replace(&format!("\"size\":{GRANULE}"), "\"size\":4096");
    assert_ne!(other, text);
    assert!(Harness::new(false, false).function.restore(&serde_json::from_str(&other).unwrap()).is_err());
}

proptest! {
    #[test]
    fn no_driver_harms(bytes in prop::collection::vec(any::<u8>(), 0..0x1000)) {
        super::fuzzing::run(&bytes);
    }
}

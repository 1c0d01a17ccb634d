// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the device through its PCI transport. The tests act as the driver.

use std::fs::{self, File};
use std::sync::Arc;

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::spec::{DEVICE_TYPE, GRANULE};
use super::{PmemParams, VirtioPmem, create};
use crate::pci::PciDevice;
use crate::virtio::VirtioDevice;
use crate::virtio::test_driver::*;
use crate::virtio::test_support::{FakeMsi, FakeSlots, SOON, set_bus_master};

const RINGS: Rings = Rings { first: [0x1000, 0x2000, 0x3000], stride: 0, size: 16 };
/// Addresses of the request and of its answer.
const REQUEST: u64 = 0x4000;
const ANSWER: u64 = 0x4800;
/// Guest-physical address of the device's memory.
const PLACE: u64 = 0x10_0000_0000;

struct Memory {
    dir: tempfile::TempDir,
    slots: Arc<FakeSlots>,
}

type Harness = TestDriver<VirtioPmem, Memory>;

impl Harness {
    fn new(discard_writes: bool, translated: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("memory");
        File::create(&path).unwrap().set_len(GRANULE).unwrap();
        let file = File::options().read(true).write(!discard_writes).open(&path).unwrap();
        let platform = TestPlatform::new(0x1_0000, translated);
        let slots = Arc::new(FakeSlots::default());
        let params = PmemParams {
            id: "_pmem0".into(),
            file,
            path: path.display().to_string(),
            size: GRANULE,
            discard_writes,
            slots: slots.clone(),
            memory: platform.memory.clone(),
            msi: Arc::new(FakeMsi::default()),
            doorbells: None,
            observer: None,
        };
        let harness = platform.drive(create(params).unwrap(), RINGS, Memory { dir, slots });
        harness.function.bar_moved(2, PLACE).unwrap();
        harness
    }

    fn start(&mut self) {
        self.map_pages(RINGS.first.into_iter().chain([REQUEST]));
        self.set_up(0, [0]);
    }

    /// Adds a request of type `kind` to the empty queue.
    fn request(&mut self, kind: u32, parts: &[Part]) {
        self.ram.write_obj(kind, GuestAddress(REQUEST)).unwrap();
        self.ram.write_obj(0xffu32, GuestAddress(ANSWER)).unwrap();
        self.chain(0, parts);
        self.ring(0);
    }

    fn answer(&self) -> u32 {
        self.served(0);
        self.ram.read_obj(GuestAddress(ANSWER)).unwrap()
    }

    /// Makes a request with one buffer for the type and one buffer for the answer, as Linux does. Returns the answer.
    fn flush(&mut self, kind: u32) -> u32 {
        self.request(kind, &[(REQUEST + self.offset(), 4, NEXT), (ANSWER + self.offset(), 4, WRITE)]);
        self.answer()
    }

    fn first_byte(&self) -> u8 {
        fs::read(self.dir.path().join("memory")).unwrap()[0]
    }
}

#[test]
fn guest_write_reaches_the_file_and_flush_succeeds() {
    let mut harness = Harness::new(false, false);
    harness.check_id(DEVICE_TYPE);
    assert_eq!([0, 8].map(|offset| u64::from_le_bytes(harness.config(offset))), [PLACE, GRANULE]);
    harness.start();
    harness.slots.store(PLACE, 7);
    assert_eq!(harness.flush(0), 0);
    assert_eq!(harness.first_byte(), 7);
    let counters = harness.device.counters();
    assert_eq!((counters.flushes, counters.errors), (1, 0));
}

#[test]
fn flush_behind_the_iommu_succeeds_with_mapped_buffers() {
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
        assert_eq!((harness.used(0), harness.ram.read_obj::<u32>(GuestAddress(ANSWER)).unwrap()), (0, 0xff));
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
        harness.broken();
        assert_eq!(harness.used(0), 0);
    }
}

#[test]
fn memory_slot_follows_its_bar() {
    let harness = Harness::new(false, false);
    harness.slots.store(PLACE, 5);
    harness.function.bar_moved(2, 2 * PLACE).unwrap();
    assert_eq!((harness.slots.len(), harness.slots.load(2 * PLACE)), (1, 5));
    harness.function.bar_moved(2, 2 * PLACE).unwrap();
    harness.function.bar_released(2).unwrap();
    assert_eq!(harness.slots.len(), 0);
    harness.function.bar_moved(2, PLACE).unwrap();
    let Harness { more: Memory { slots, .. }, function, device, .. } = harness;
    drop((function, device));
    assert_eq!(slots.len(), 0);
}

#[test]
fn restore_needs_a_device_of_the_saved_size() {
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
    fn random_driver_does_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..0x1000)) {
        super::fuzzing::run(&bytes);
    }
}

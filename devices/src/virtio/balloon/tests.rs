// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the device through its PCI transport. The tests act as the driver.

use std::sync::Arc;

use iommu_bounce::test_utils::RecordingMapper;
use iommu_bounce::{DmaMapper, Permissions};
use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::spec::{DEVICE_TYPE, PAGE, queue};
use super::{BalloonParams, VirtioBalloon, create};
use crate::pci::PciDevice;
use crate::platform::DeviceEvent;
use crate::reclaim::{PinningMapper, Reclaim};
use crate::virtio::VirtioDevice;
use crate::virtio::test_driver::*;
use crate::virtio::test_support::{FakeMsi, SOON, set_bus_master};

const RINGS: Rings = Rings { first: [0x1000, 0x1400, 0x1800], stride: 0x1000, size: 16 };
const NUMBERS: u64 = 0x8000;
const READ: u16 = 0;
const MARK: u64 = 0x6d61_726b;

struct Memory {
    reclaim: Arc<Reclaim>,
}

type Harness = TestDriver<VirtioBalloon, Memory>;

impl Harness {
    fn new() -> Self {
        let platform = TestPlatform::new(8 << 20, false);
        let reclaim = Arc::new(Reclaim::new(platform.ram.clone(), PAGE));
        let params = BalloonParams {
            id: "_balloon".into(),
            size: 2 << 20,
            deflate_on_oom: true,
            free_page_reporting: true,
            reclaim: reclaim.clone(),
            memory: platform.memory.clone(),
            msi: Arc::new(FakeMsi::default()),
            doorbells: Some(platform.doorbells.clone()),
            observer: Some(platform.recorder.clone()),
        };
        platform.drive(create(params).unwrap(), RINGS, Memory { reclaim })
    }

    /// Creates a device whose driver uses index 2 for the queue of free pages, like Linux's driver.
    fn linux() -> Self {
        let harness = Self::new();
        harness.set_up(0b10_0100, [0, 1, 2]);
        harness
    }

    /// Adds a request with one buffer to a queue.
    fn add(&mut self, queue: u16, address: u64, len: u32, flags: u16) {
        self.chain(queue, &[(address, len, flags)]);
        self.ring(queue);
    }

    /// Adds a request with page numbers to a queue.
    fn number(&mut self, queue: u16, pages: &[u32]) {
        for (place, page) in (NUMBERS..).step_by(4).zip(pages) {
            self.ram.write_obj(*page, GuestAddress(place)).unwrap();
        }
        self.add(queue, NUMBERS, u32::try_from(4 * pages.len()).unwrap(), READ);
    }

    fn mark(&self, pages: impl IntoIterator<Item = u64>) {
        pages.into_iter().for_each(|page| self.ram.write_obj(MARK, GuestAddress(page * PAGE)).unwrap());
    }

    /// Returns the pages of `pages` that still start with `MARK`. The device did not return these pages to the host.
    fn kept(&self, pages: impl IntoIterator<Item = u64>) -> Vec<u64> {
        let is_kept = |page: &u64| self.ram.read_obj::<u64>(GuestAddress(page * PAGE)).unwrap() == MARK;
        pages.into_iter().filter(is_kept).collect()
    }

    /// Returns the balloon's target size and present size, in pages.
    fn sizes(&self) -> [u32; 2] {
        [0, 4].map(|offset| u32::from_le_bytes(self.config(offset)))
    }
}

#[test]
fn only_ballooned_pages_are_returned_to_the_host() {
    let mut harness = Harness::linux();
    harness.mark(512..1024);
    harness.number(queue::INFLATE, &[700, 513, 701, 699, 600]);
    harness.served(queue::INFLATE);
    let gone = [513, 600, 699, 700, 701];
    assert_eq!(harness.kept(512..1024), (512..1024).filter(|page| !gone.contains(page)).collect::<Vec<_>>());
    harness.number(queue::DEFLATE, &[513, 600]);
    harness.served(queue::DEFLATE);
    let counters = harness.device.counters();
    assert_eq!((counters.inflated_bytes, counters.deflated_bytes), (5 * PAGE, 2 * PAGE));
    assert_eq!((counters.given_back_bytes, counters.kept_back_bytes), (5 * PAGE, 0));
}

#[test]
fn no_page_is_returned_while_bus_mastering_is_off() {
    let mut harness = Harness::linux();
    harness.mark([513]);
    set_bus_master(&harness.function, false);
    harness.number(queue::INFLATE, &[513]);
    harness.device.notify(queue::INFLATE).unwrap();
    std::thread::sleep(SOON);
    assert_eq!((harness.used(queue::INFLATE), harness.kept([513])), (0, vec![513]));
    set_bus_master(&harness.function, true);
    harness.served(queue::INFLATE);
    assert!(harness.kept([513]).is_empty());
}

#[test]
fn pages_mapped_by_a_host_device_are_kept() {
    let mut harness = Harness::linux();
    harness.mark(512..520);
    let mut mapper = PinningMapper::new(RecordingMapper::default(), harness.reclaim.clone());
    let buffer = harness.ram.get_slice(GuestAddress(514 * PAGE), 4096).unwrap();
    mapper.map(0, buffer, Permissions::WRITE).unwrap();
    harness.number(queue::INFLATE, &[513, 514, 515]);
    harness.served(queue::INFLATE);
    assert_eq!(harness.kept(513..516), [514]);
    assert_eq!(harness.device.counters().kept_back_bytes, PAGE);
    mapper.unmap(0, PAGE).unwrap();
    harness.number(queue::INFLATE, &[514]);
    harness.served(queue::INFLATE);
    assert!(harness.kept(513..516).is_empty());
}

#[test]
fn free_pages_are_returned_from_any_reporting_queue() {
    for queue in queue::REPORTING {
        let mut harness = Harness::new();
        harness.set_up(0b10_0100, [0, 1, queue]);
        harness.mark(512..1536);
        harness.add(queue, 1024 * PAGE, 2 << 20, WRITE);
        harness.served(queue);
        assert_eq!(harness.kept(512..1536), (512..1024).collect::<Vec<_>>());
        assert_eq!(harness.device.counters().reported_bytes, 2 << 20);
    }
}

#[test]
fn page_numbers_outside_ram_are_ignored() {
    let mut harness = Harness::linux();
    harness.number(queue::INFLATE, &[2048, u32::MAX, u32::MAX, 1 << 20]);
    harness.served(queue::INFLATE);
    let counters = harness.device.counters();
    assert_eq!((counters.given_back_bytes, counters.kept_back_bytes), (0, 0));
}

#[test]
fn invalid_requests_fail_the_device_until_reset() {
    let requests: [(u16, u64, u32, u16); 7] = [
        (queue::INFLATE, NUMBERS, 4, WRITE),
        (queue::DEFLATE, NUMBERS, 4, WRITE),
        (queue::INFLATE, NUMBERS, 6, READ),
        (queue::INFLATE, 1 << 40, 4, READ),
        (queue::INFLATE, NUMBERS, (64 << 10) + 4, READ),
        (queue::INFLATE, NUMBERS, u32::MAX - 3, READ),
        (2, NUMBERS, 4096, READ),
    ];
    for (queue, address, len, flags) in requests {
        let mut harness = Harness::linux();
        harness.add(queue, address, len, flags);
        wait_until(|| harness.status() == 15 | 64);
        assert_eq!(harness.recorder.take(), [DeviceEvent::Activated, DeviceEvent::Failed]);
        harness.write(20, &[0]);
        assert_eq!(harness.status(), 0);
    }
    // The driver reports free pages although it has not accepted the feature.
    let mut harness = Harness::new();
    harness.set_up(0, [0, 1, 2]);
    harness.add(2, 1024 * PAGE, 4096, WRITE);
    wait_until(|| harness.status() == 15 | 64);
}

#[test]
fn resize_notifies_driver_which_reports_actual_size() {
    let harness = Harness::linux();
    assert_eq!((harness.sizes(), harness.device.actual_size()), ([512, 0], 0));
    let before = harness.generation();
    harness.device.resize(4 << 20);
    assert_eq!((harness.sizes(), harness.generation()), ([1024, 0], before + 1));
    harness.device.write_config(4, &100u32.to_le_bytes());
    harness.device.write_config(0, &7u32.to_le_bytes());
    harness.device.write_config(4, &[1, 2]);
    assert_eq!((harness.sizes(), harness.device.actual_size()), ([1024, 100], 100 * PAGE));
    harness.write(20, &[0]);
    assert_eq!(harness.sizes(), [1024, 0], "the balloon of another driver is empty");
    assert_eq!(harness.device.properties().device_type, DEVICE_TYPE);
}

#[test]
fn restored_device_continues_with_the_next_request() {
    let mut old = Harness::linux();
    old.device.write_config(4, &5u32.to_le_bytes());
    old.device.resize(3 << 20);
    old.number(queue::INFLATE, &[600]);
    old.served(queue::INFLATE);
    old.function.pause();
    old.number(queue::INFLATE, &[601]);
    let mut new = Harness::new();
    new.restore_from(&old);
    new.mark(600..603);
    assert_eq!((new.sizes(), new.used(queue::INFLATE)), ([768, 5], 1));
    new.function.resume();
    new.served(queue::INFLATE);
    assert_eq!(new.kept(600..603), [600, 602]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn device_with_corrupt_state_can_be_reset(changes in changes()) {
        let old = Harness::linux();
        old.function.pause();
        Harness::new().survives(&old.function.save().unwrap(), changes);
    }

    #[test]
    fn random_rings_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..0x1800)) {
        super::fuzzing::run(&bytes);
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the device through its PCI transport. The tests act as the driver.

use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use iommu_bounce::{DmaMapper, Permissions};
use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::spec::DEVICE_TYPE;
use super::{RngParams, VirtioRng, create};
use crate::pci::PciDevice;
use crate::pci::regs::{COMMAND, COMMAND_BUS_MASTER, COMMAND_IO, COMMAND_MEMORY};
use crate::virtio::VirtioDevice;
use crate::virtio::test_driver::*;
use crate::virtio::test_support::{FakeMsi, SOON, set_bus_master};

const RINGS: Rings = Rings { first: [0x1000, 0x2000, 0x3000], stride: 0, size: 16 };
const BUFFER: u64 = 0x4000;

type Harness = TestDriver<VirtioRng>;

impl Harness {
    fn new(source: File, translated: bool) -> Self {
        let platform = TestPlatform::new(0x10_0000, translated);
        let params = RngParams {
            id: "_rng".into(),
            source,
            memory: platform.memory.clone(),
            msi: Arc::new(FakeMsi::default()),
            doorbells: Some(platform.doorbells.clone()),
            observer: Some(platform.recorder.clone()),
        };
        platform.drive(create(params).unwrap(), RINGS, ())
    }

    /// Creates a device with an endless source of random bytes.
    fn endless(translated: bool) -> Self {
        Self::new(File::open("/dev/urandom").unwrap(), translated)
    }

    /// Maps the rings and the buffer.
    fn map_all(&mut self) {
        self.map_pages(RINGS.first.into_iter().chain([BUFFER]));
    }

    /// Initialises the device as a driver does.
    fn start(&mut self) {
        self.map_all();
        self.set_up(0, [0]);
    }

    /// Adds a request with one buffer to the queue.
    fn add(&mut self, address: u64, len: u32, flags: u16) {
        self.chain(0, &[(address, len, flags)]);
    }

    /// Waits until the device has served all requests, and returns the length of the last used element.
    fn filled(&self) -> u32 {
        self.served(0);
        self.last_len(0)
    }
}

#[test]
fn buffer_is_filled_with_bytes_of_the_source() {
    let mut harness = Harness::endless(false);
    harness.check_id(DEVICE_TYPE);
    harness.start();
    harness.add(BUFFER, 64, WRITE);
    harness.ring(0);
    assert_eq!(harness.filled(), 64);
    assert_ne!(harness.bytes(BUFFER, 64), [0; 64]);
    let counters = harness.device.counters();
    assert_eq!((counters.requests, counters.bytes, counters.source_errors), (1, 64, 0));
}

#[test]
fn stopping_a_missing_queue_changes_nothing() {
    let mut harness = Harness::endless(false);
    harness.start();
    assert_eq!(harness.device.stop_queue(1), None);
    // Only a paused device returns the state of a queue.
    harness.function.pause();
    assert_eq!(harness.device.queue_state(1), None);
    harness.function.resume();
    harness.add(BUFFER, 64, WRITE);
    harness.ring(0);
    assert_eq!(harness.filled(), 64);
}

#[test]
fn doorbell_is_connected_only_while_active_as_bus_master() {
    let mut harness = Harness::endless(false);
    assert_eq!(harness.doorbells.count(), 0);
    harness.start();
    assert_eq!(harness.doorbells.count(), 1);
    // Notify the device through the registered doorbell, as the kernel does.
    harness.add(BUFFER, 8, WRITE);
    harness.doorbells.ring(NOTIFY_PORT);
    assert_eq!(harness.filled(), 8);
    harness.function.write_config(COMMAND, &(COMMAND_MEMORY | COMMAND_IO).to_le_bytes());
    assert_eq!(harness.doorbells.count(), 0);
    harness.function.write_config(COMMAND, &(COMMAND_MEMORY | COMMAND_IO | COMMAND_BUS_MASTER).to_le_bytes());
    assert_eq!(harness.doorbells.count(), 1);
    harness.write(20, &[0]);
    assert_eq!(harness.doorbells.count(), 0);
}

#[test]
fn huge_buffer_is_filled_partly() {
    let mut harness = Harness::endless(false);
    harness.start();
    harness.add(BUFFER, u32::MAX, WRITE);
    harness.ring(0);
    assert_eq!(harness.filled(), 64 << 10);
}

#[test]
fn broken_rule_fails_the_device_until_reset() {
    for (address, len, flags) in [(BUFFER, 64, 0), (BUFFER, 0, WRITE), (1 << 40, 64, WRITE), (BUFFER, 64, WRITE | 1)] {
        let mut harness = Harness::endless(false);
        harness.start();
        harness.chain_to_nowhere(0, (address, len, flags));
        harness.ring(0);
        harness.fails_until_reset(0);
    }
}

#[test]
fn device_behind_the_iommu_reaches_only_mapped_iovas() {
    let mut harness = Harness::endless(true);
    harness.start();
    harness.add(BUFFER + OFFSET, 64, WRITE);
    harness.ring(0);
    assert_eq!(harness.filled(), 64);
    assert_ne!(harness.bytes(BUFFER, 64), [0; 64]);
    // This address is a guest-physical address, not an IOVA.
    harness.add(BUFFER, 64, WRITE);
    harness.ring(0);
    harness.broken();
    let (faults, _) = harness.relay.take();
    assert_eq!((faults[0].iova, faults[0].access), (BUFFER, Permissions::WRITE));
}

#[test]
fn driver_without_iommu_feature_is_rejected() {
    let harness = Harness::endless(true);
    harness.write(20, &[3]);
    harness.write(8, &1u32.to_le_bytes());
    harness.write(12, &1u32.to_le_bytes());
    harness.write(20, &[11]);
    assert_eq!(harness.status(), 3);
}

#[test]
fn unmapped_buffer_is_not_written_after_the_unmap() {
    let mut harness = Harness::endless(true);
    harness.start();
    harness.add(BUFFER + OFFSET, 0x1000, WRITE);
    harness.ring(0);
    harness.filled();
    harness.mapper.as_mut().unwrap().unmap(BUFFER + OFFSET, 0x1000).unwrap();
    harness.ram.write_slice(&[0; 64], GuestAddress(BUFFER)).unwrap();
    harness.add(BUFFER + OFFSET, 64, WRITE);
    harness.ring(0);
    harness.broken();
    assert_eq!(harness.bytes(BUFFER, 64), [0; 64]);
}

/// Returns a pipe that does not block.
fn pipe() -> (File, File) {
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
    (File::from(reader), File::from(writer))
}

#[test]
fn request_waits_for_an_empty_source_without_blocking_reset() {
    let (source, mut writer) = pipe();
    let mut harness = Harness::new(source, false);
    harness.start();
    harness.add(BUFFER, 64, WRITE);
    harness.ring(0);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(harness.used(0), 0);
    harness.function.pause();
    harness.function.resume();
    writer.write_all(b"random").unwrap();
    assert_eq!(harness.filled(), 6);
    assert_eq!(harness.bytes(BUFFER, 6), b"random");
    harness.add(BUFFER, 64, WRITE);
    harness.ring(0);
    harness.write(20, &[0]);
    assert_eq!(harness.status(), 0);
}

#[test]
fn request_is_not_served_while_bus_mastering_is_off() {
    for translated in [false, true] {
        let (source, mut writer) = pipe();
        let mut harness = Harness::new(source, translated);
        harness.start();
        harness.add(BUFFER + harness.offset(), 64, WRITE);
        harness.ring(0);
        set_bus_master(&harness.function, false);
        writer.write_all(b"random").unwrap();
        // The driver may have sent this notification before it turned bus mastering off.
        harness.device.notify(0).unwrap();
        std::thread::sleep(SOON);
        assert_eq!((harness.used(0), harness.bytes(BUFFER, 6)), (0, vec![0; 6]));
        set_bus_master(&harness.function, true);
        assert_eq!(harness.filled(), 6);
        assert_eq!(harness.bytes(BUFFER, 6), b"random");
    }
}

#[test]
fn ended_source_is_counted_and_device_survives() {
    let (source, writer) = pipe();
    drop(writer);
    let mut harness = Harness::new(source, false);
    harness.start();
    harness.add(BUFFER, 64, WRITE);
    harness.ring(0);
    wait_until(|| harness.device.counters().source_errors != 0);
    assert_eq!((harness.used(0), harness.status()), (0, 15));
}

#[test]
fn restored_device_continues_with_the_next_request() {
    for translated in [false, true] {
        let mut old = Harness::endless(translated);
        old.start();
        old.add(BUFFER + old.offset(), 32, WRITE);
        old.ring(0);
        old.filled();
        old.function.pause();
        // The request arrives while the device is paused.
        old.add(BUFFER + old.offset(), 16, WRITE);
        let mut new = Harness::endless(translated);
        new.map_all();
        new.restore_from(&old);
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(new.used(0), 1, "the device is paused");
        new.function.resume();
        assert_eq!(new.filled(), 16);
        new.add(BUFFER + new.offset(), 8, WRITE);
        new.ring(0);
        assert_eq!(new.filled(), 8);
    }
}

#[test]
fn invalid_driver_state_is_rejected() {
    let mut old = Harness::endless(false);
    old.start();
    old.function.pause();
    let state = old.function.save().unwrap();
    for (pointer, value) in [
        ("/common/status", serde_json::json!(4)),
        ("/common/status", serde_json::json!(16)),
        ("/common/driver_features", serde_json::json!(1)),
        ("/common/queues/0/size", serde_json::json!(3)),
        ("/common/queues/0/size", serde_json::json!(512)),
        ("/common/queues/0/served", serde_json::Value::Null),
        ("/common/queues/0/enabled", serde_json::json!(false)),
        ("/common/queues/0/used", serde_json::json!(1u64 << 40)),
        ("/common/queues/0/available", serde_json::json!(u64::MAX)),
        ("/common/queues", serde_json::json!([])),
        ("/interrupts/config_vector", serde_json::json!(7)),
        ("/interrupts/isr", serde_json::json!(4)),
        ("/device/kind", serde_json::json!("net")),
        ("/device/version", serde_json::json!(2)),
    ] {
        Harness::endless(false).refuses(&state, pointer, &value);
    }
}

/// Returns the state of a device that has served a request. The RAM of that device no longer exists.
fn saved() -> crate::state::DeviceState {
    let mut old = Harness::endless(false);
    old.start();
    old.add(BUFFER, 32, WRITE);
    old.ring(0);
    old.filled();
    old.function.pause();
    old.function.save().unwrap()
}

proptest! {
    #[test]
    fn device_with_corrupt_state_can_be_reset(changes in changes()) {
        Harness::endless(false).survives(&saved(), changes);
    }

    #[test]
    fn random_rings_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..0x1200)) {
        super::fuzzing::run(&bytes);
    }
}

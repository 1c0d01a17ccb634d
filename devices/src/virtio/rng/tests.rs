// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The device behind its transport, with a driver that the tests play.

use std::fs::File;
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, Instant};

use iommu_bounce::{DmaMapper, Permissions};
use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use super::spec::DEVICE_TYPE;
use super::{RngParams, VirtioRng, create};
use crate::dma::{DeviceMemory, DmaTable, TableMapper, fault_relay};
use crate::pci::PciDevice;
use crate::pci::regs::{COMMAND, COMMAND_BUS_MASTER, COMMAND_IO, COMMAND_MEMORY};
use crate::platform::DeviceEvent;
use crate::platform::test_support::Witness;
use crate::ram::Ram;
use crate::virtio::test_support::{FakeDoorbells, FakeMsi, SOON, set_bus_master, spoil};
use crate::virtio::{VirtioDevice, VirtioPciDevice};

const ACCESS_PLATFORM: u32 = 1 << 1;
const VERSION_1: u32 = 1 << 0;
/// Descriptors, available ring and used ring, as the driver names them.
const RINGS: [u64; 3] = [0x1000, 0x2000, 0x3000];
const BUFFER: u64 = 0x4000;
/// How far IOVAs are from guest-physical addresses where the device is behind an IOMMU.
const OFFSET: u64 = 0x1000_0000;
const NOTIFY_PORT: u64 = 0xc000;

struct Harness {
    ram: Arc<Ram>,
    function: Arc<VirtioPciDevice>,
    device: Arc<VirtioRng>,
    witness: Arc<Witness>,
    doorbells: Arc<FakeDoorbells>,
    mapper: Option<TableMapper>,
    relay: crate::dma::FaultRelay,
    /// Elements that were put into the available ring.
    added: u16,
}

impl Harness {
    fn new(source: File, translated: bool) -> Self {
        let ram = Arc::new(Ram::from_ranges(&[(GuestAddress(0), 0x10_0000)]).unwrap());
        let (sender, relay) = fault_relay();
        let table = translated.then(|| Arc::new(DmaTable::new("rng", ram.clone(), Some((8, sender)))));
        let memory = table.clone().map_or_else(|| DeviceMemory::all_ram(ram.clone()), DeviceMemory::mapped);
        let mapper = table.map(TableMapper::new);
        let (witness, doorbells) = (Arc::new(Witness::default()), Arc::new(FakeDoorbells::default()));
        let params = RngParams {
            id: "_rng".into(),
            source,
            memory,
            msi: Arc::new(FakeMsi::default()),
            doorbells: Some(doorbells.clone()),
            observer: Some(witness.clone()),
        };
        let (function, device) = create(params).unwrap();
        let command = COMMAND_BUS_MASTER | COMMAND_MEMORY | COMMAND_IO;
        function.assign_bar(1, NOTIFY_PORT);
        function.write_config(COMMAND, &command.to_le_bytes());
        function.bar_moved(1, NOTIFY_PORT).unwrap();
        Self { ram, function, device, witness, doorbells, mapper, relay, added: 0 }
    }

    /// With a source that never ends.
    fn endless(translated: bool) -> Self {
        Self::new(File::open("/dev/urandom").unwrap(), translated)
    }

    fn offset(&self) -> u64 {
        if self.mapper.is_some() { OFFSET } else { 0 }
    }

    fn map(&mut self, gpa: u64, len: u64, permissions: Permissions) {
        let slice = self.ram.get_slice(GuestAddress(gpa), usize::try_from(len).unwrap()).unwrap();
        if let Some(mapper) = &mut self.mapper {
            mapper.map(gpa + OFFSET, slice, permissions).unwrap();
        }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.function.write_bar(0, offset, data);
    }

    fn status(&self) -> u8 {
        let mut status = [0];
        self.function.read_bar(0, 20, &mut status);
        status[0]
    }

    /// Sets the device up as a driver does.
    fn start(&mut self) {
        for page in [RINGS[0], RINGS[1], RINGS[2], BUFFER] {
            self.map(page, 0x1000, Permissions::READ | Permissions::WRITE);
        }
        let offset = self.offset();
        self.write(20, &[1]);
        self.write(20, &[3]);
        let high = VERSION_1 | if self.mapper.is_some() { ACCESS_PLATFORM } else { 0 };
        self.write(8, &1u32.to_le_bytes());
        self.write(12, &high.to_le_bytes());
        self.write(20, &[11]);
        assert_eq!(self.status(), 11, "features are accepted");
        self.write(22, &0u16.to_le_bytes());
        self.write(24, &16u16.to_le_bytes());
        for (place, ring) in [32, 40, 48].into_iter().zip(RINGS) {
            self.write(place, &(ring + offset).to_le_bytes());
        }
        self.write(28, &1u16.to_le_bytes());
        self.write(20, &[15]);
    }

    /// Puts a request of one buffer into the queue.
    fn add(&mut self, address: u64, len: u32, flags: u16) {
        let slot = u64::from(self.added % 16);
        let descriptor = GuestAddress(RINGS[0] + 16 * slot);
        self.ram.write_obj(address, descriptor).unwrap();
        self.ram.write_obj(len, GuestAddress(descriptor.0 + 8)).unwrap();
        self.ram.write_obj(flags, GuestAddress(descriptor.0 + 12)).unwrap();
        self.ram.write_obj(self.added % 16, GuestAddress(RINGS[1] + 4 + 2 * slot)).unwrap();
        self.added += 1;
        self.ram.write_obj(self.added, GuestAddress(RINGS[1] + 2)).unwrap();
    }

    fn ring(&self) {
        self.function.write_bar(1, 0, &0u16.to_le_bytes());
    }

    fn used(&self) -> u16 {
        self.ram.read_obj(GuestAddress(RINGS[2] + 2)).unwrap()
    }

    /// The length of the last used element, once there are as many as were added.
    fn served(&self) -> u32 {
        wait_until(|| self.used() == self.added);
        self.ram.read_obj(GuestAddress(RINGS[2] + 4 + 8 * u64::from((self.added - 1) % 16) + 4)).unwrap()
    }

    fn bytes(&self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.ram.read_slice(&mut bytes, GuestAddress(BUFFER)).unwrap();
        bytes
    }
}

fn wait_until(mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(1));
    }
}

const WRITE: u16 = 2;

#[test]
fn buffer_is_filled_with_bytes_of_the_source() {
    let mut harness = Harness::endless(false);
    let mut id = [0; 4];
    harness.function.read_config(0, &mut id);
    assert_eq!(u32::from_le_bytes(id), (u32::from(DEVICE_TYPE) + 0x1040) << 16 | 0x1af4);
    harness.start();
    harness.add(BUFFER, 64, WRITE);
    harness.ring();
    assert_eq!(harness.served(), 64);
    assert_ne!(harness.bytes(64), [0; 64]);
    let counters = harness.device.counters();
    assert_eq!((counters.requests, counters.bytes, counters.source_errors), (1, 64, 0));
}

#[test]
fn stop_of_a_missing_queue_leaves_the_device_serving() {
    let mut harness = Harness::endless(false);
    harness.start();
    assert_eq!(harness.device.stop_queue(1), None);
    assert_eq!(harness.device.queue_state(1), None);
    harness.add(BUFFER, 64, WRITE);
    harness.ring();
    assert_eq!(harness.served(), 64);
}

#[test]
fn doorbell_is_connected_only_while_active_as_bus_master() {
    let mut harness = Harness::endless(false);
    assert_eq!(harness.doorbells.count(), 0);
    harness.start();
    assert_eq!(harness.doorbells.count(), 1);
    // The kernel rings it.
    harness.add(BUFFER, 8, WRITE);
    harness.doorbells.ring(NOTIFY_PORT);
    assert_eq!(harness.served(), 8);
    harness.function.write_config(COMMAND, &(COMMAND_MEMORY | COMMAND_IO).to_le_bytes());
    assert_eq!(harness.doorbells.count(), 0);
    harness.function.write_config(COMMAND, &(COMMAND_MEMORY | COMMAND_IO | COMMAND_BUS_MASTER).to_le_bytes());
    assert_eq!(harness.doorbells.count(), 1);
    harness.write(20, &[0]);
    assert_eq!(harness.doorbells.count(), 0);
}

#[test]
fn huge_buffer_gets_a_bounded_part() {
    let mut harness = Harness::endless(false);
    harness.start();
    harness.add(BUFFER, u32::MAX, WRITE);
    harness.ring();
    assert_eq!(harness.served(), 64 << 10);
}

#[test]
fn driver_that_breaks_a_rule_is_told_to_reset_and_can() {
    for (address, len, flags) in [(BUFFER, 64, 0), (BUFFER, 0, WRITE), (1 << 40, 64, WRITE), (BUFFER, 64, WRITE | 1)] {
        let mut harness = Harness::endless(false);
        harness.start();
        // The next descriptor that it names is out of the table.
        harness.ram.write_obj(99u16, GuestAddress(RINGS[0] + 14)).unwrap();
        harness.add(address, len, flags);
        harness.ring();
        wait_until(|| harness.status() & 64 != 0);
        assert_eq!(harness.used(), 0);
        harness.write(20, &[0]);
        assert_eq!(harness.status(), 0);
        assert_eq!(harness.witness.take(), [DeviceEvent::Activated, DeviceEvent::Failed, DeviceEvent::Reset]);
    }
}

#[test]
fn device_behind_the_iommu_reaches_only_mapped_iovas() {
    let mut harness = Harness::endless(true);
    harness.start();
    harness.add(BUFFER + OFFSET, 64, WRITE);
    harness.ring();
    assert_eq!(harness.served(), 64);
    assert_ne!(harness.bytes(64), [0; 64]);
    // A guest-physical address is no IOVA.
    harness.add(BUFFER, 64, WRITE);
    harness.ring();
    wait_until(|| harness.status() & 64 != 0);
    let (faults, _) = harness.relay.take();
    assert_eq!((faults[0].iova, faults[0].access), (BUFFER, Permissions::WRITE));
}

#[test]
fn driver_that_does_not_know_of_the_iommu_is_refused() {
    let harness = Harness::endless(true);
    harness.write(20, &[3]);
    harness.write(8, &1u32.to_le_bytes());
    harness.write(12, &VERSION_1.to_le_bytes());
    harness.write(20, &[11]);
    assert_eq!(harness.status(), 3);
}

#[test]
fn unmap_takes_the_buffer_away_before_it_is_answered() {
    let mut harness = Harness::endless(true);
    harness.start();
    harness.add(BUFFER + OFFSET, 0x1000, WRITE);
    harness.ring();
    harness.served();
    harness.mapper.as_mut().unwrap().unmap(BUFFER + OFFSET, 0x1000).unwrap();
    harness.ram.write_slice(&[0; 64], GuestAddress(BUFFER)).unwrap();
    harness.add(BUFFER + OFFSET, 64, WRITE);
    harness.ring();
    wait_until(|| harness.status() & 64 != 0);
    assert_eq!(harness.bytes(64), [0; 64]);
}

/// A pipe whose reading end does not wait.
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
    harness.ring();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(harness.used(), 0);
    harness.function.pause();
    harness.function.resume();
    writer.write_all(b"random").unwrap();
    assert_eq!(harness.served(), 6);
    assert_eq!(harness.bytes(6), b"random");
    harness.add(BUFFER, 64, WRITE);
    harness.ring();
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
        harness.ring();
        set_bus_master(&harness.function, false);
        writer.write_all(b"random").unwrap();
        // A notification that is on its way.
        harness.device.notify(0).unwrap();
        std::thread::sleep(SOON);
        assert_eq!((harness.used(), harness.bytes(6)), (0, vec![0; 6]));
        set_bus_master(&harness.function, true);
        assert_eq!(harness.served(), 6);
        assert_eq!(harness.bytes(6), b"random");
    }
}

#[test]
fn source_that_ends_is_counted_and_the_device_goes_on() {
    let (source, writer) = pipe();
    drop(writer);
    let mut harness = Harness::new(source, false);
    harness.start();
    harness.add(BUFFER, 64, WRITE);
    harness.ring();
    wait_until(|| harness.device.counters().source_errors != 0);
    assert_eq!((harness.used(), harness.status()), (0, 15));
}

#[test]
fn restored_device_goes_on_with_the_next_request() {
    for translated in [false, true] {
        let mut old = Harness::endless(translated);
        old.start();
        old.add(BUFFER + old.offset(), 32, WRITE);
        old.ring();
        old.served();
        old.function.pause();
        // It comes while the device is paused.
        old.add(BUFFER + old.offset(), 16, WRITE);
        let state = old.function.save().unwrap();
        let text = serde_json::to_string(&state).unwrap();
        let mut new = Harness::endless(translated);
        let mut page = [0; 0x1000];
        for address in [RINGS[0], RINGS[1], RINGS[2], BUFFER] {
            old.ram.read_slice(&mut page, GuestAddress(address)).unwrap();
            new.ram.write_slice(&page, GuestAddress(address)).unwrap();
            new.map(address, 0x1000, Permissions::READ | Permissions::WRITE);
        }
        new.added = old.added;
        new.function.restore(&serde_json::from_str(&text).unwrap()).unwrap();
        assert_eq!(new.function.save().unwrap(), state);
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(new.used(), 1, "it is paused");
        new.function.resume();
        assert_eq!(new.served(), 16);
        new.add(BUFFER + new.offset(), 8, WRITE);
        new.ring();
        assert_eq!(new.served(), 8);
    }
}

#[test]
fn state_that_no_driver_can_have_made_is_refused() {
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
        let mut state = state.clone();
        *state.payload.pointer_mut(pointer).unwrap() = value.clone();
        let new = Harness::endless(false);
        assert!(new.function.restore(&state).is_err(), "{pointer} {value}");
        // It can be reset, and used, as any other.
        new.function.reset().unwrap();
        assert_eq!(new.status(), 0);
    }
}

/// The state of a device that has served a request, on RAM that is not there any more.
fn saved() -> crate::state::DeviceState {
    let mut old = Harness::endless(false);
    old.start();
    old.add(BUFFER, 32, WRITE);
    old.ring();
    old.served();
    old.function.pause();
    old.function.save().unwrap()
}

proptest! {
    #[test]
    fn device_of_a_spoiled_state_can_be_reset(
        changes in prop::collection::vec((any::<usize>(), any::<u64>()), 1..4)
    ) {
        let mut value = serde_json::to_value(saved()).unwrap();
        for (place, with) in changes {
            spoil(&mut value, place, with);
        }
        let new = Harness::endless(false);
        new.function.pause();
        if let Ok(state) = serde_json::from_value(value) && new.function.restore(&state).is_ok() {
            new.function.save().unwrap();
            new.function.resume();
            new.function.pause();
        }
        new.function.reset().unwrap();
        prop_assert_eq!(new.status(), 0);
    }

    #[test]
    fn any_rings_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..0x1200)) {
        super::fuzzing::run(&bytes);
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of faults on the event queue.

use iommu_bounce::spec::feature;
use iommu_bounce::test_utils::{attach, map};
use iommu_bounce::{Fault, FaultReason, Permissions};
use vm_memory::{Bytes, GuestAddress};

use super::{BASIC, ENDPOINT, Guest, NEEDS_RESET, NOTIFY, OK, RAM, STATUS, WRITE};
use crate::virtio::test_support::set_bus_master;

/// Addresses of the driver's event queue. The queue has size 4.
const DESCRIPTORS: u64 = 0x5000;
const AVAILABLE: u64 = 0x6000;
const USED: u64 = 0x7000;
const BUFFERS: u64 = 0x8000;

const FAULT: Fault =
    Fault { reason: FaultReason::Mapping, endpoint: ENDPOINT, address: Some(0x1234_5000), access: Permissions::READ };

/// Returns a guest whose driver also has an event queue.
fn guest() -> Guest {
    let mut guest = Guest::new(false);
    guest.start_with(BASIC | feature::BYPASS_CONFIG, Some([DESCRIPTORS, AVAILABLE, USED]));
    guest
}

fn give(guest: &Guest, index: u16, address: u64, len: u32) {
    let at = DESCRIPTORS + 16 * u64::from(index);
    guest.memory.write_obj(address, GuestAddress(at)).unwrap();
    guest.memory.write_obj(len, GuestAddress(at + 8)).unwrap();
    guest.memory.write_obj(WRITE, GuestAddress(at + 12)).unwrap();
    let available: u16 = guest.memory.read_obj(GuestAddress(AVAILABLE + 2)).unwrap();
    guest.memory.write_obj(index, GuestAddress(AVAILABLE + 4 + 2 * u64::from(available % 4))).unwrap();
    guest.memory.write_obj(available.wrapping_add(1), GuestAddress(AVAILABLE + 2)).unwrap();
}

fn kick_events(guest: &Guest) {
    guest.write(NOTIFY + 4, &[1, 0]);
}

/// Returns the descriptor index and the length of each used element.
fn used(guest: &Guest) -> Vec<(u32, u32)> {
    let count: u16 = guest.memory.read_obj(GuestAddress(USED + 2)).unwrap();
    let element = |n: u16| {
        let at = USED + 4 + 8 * u64::from(n % 4);
        (guest.memory.read_obj(GuestAddress(at)).unwrap(), guest.memory.read_obj(GuestAddress(at + 4)).unwrap())
    };
    (0..count).map(element).collect()
}

fn report(guest: &Guest, address: u64) -> [u8; 24] {
    let mut bytes = [0; 24];
    guest.memory.read_slice(&mut bytes, GuestAddress(address)).unwrap();
    bytes
}

#[test]
fn fault_fills_a_buffer_that_the_driver_gave() {
    let mut guest = guest();
    give(&guest, 0, BUFFERS, 24);
    kick_events(&guest);
    assert!(used(&guest).is_empty());
    assert!(guest.handle.report_fault(FAULT));
    assert_eq!(used(&guest), [(0, 24)]);
    assert_eq!(report(&guest, BUFFERS), FAULT.encode());
    assert_eq!(guest.simple(&attach(ENDPOINT, 1)), OK, "requests still work");
}

#[test]
fn fault_waits_while_bus_mastering_is_off() {
    let mut guest = guest();
    assert_eq!(guest.simple(&attach(ENDPOINT, 1)), OK);
    give(&guest, 0, BUFFERS, 24);
    kick_events(&guest);
    set_bus_master(&guest.function, false);
    assert!(guest.handle.report_fault(FAULT));
    kick_events(&guest);
    assert_eq!((used(&guest), report(&guest, BUFFERS)), (vec![], [0; 24]));
    set_bus_master(&guest.function, true);
    assert_eq!(used(&guest), [(0, 24)]);
    assert_eq!(report(&guest, BUFFERS), FAULT.encode());
}

#[test]
fn denied_access_of_an_emulated_device_is_reported() {
    let mut guest = guest();
    assert_eq!(guest.simple(&attach(ENDPOINT, 1)), OK);
    assert_eq!(guest.simple(&map(1, 0x1000, 0x1fff, 0x8000, 1)), OK);
    give(&guest, 0, BUFFERS, 64);
    guest.handle.translate(ENDPOINT, 0x1008, Permissions::READ).unwrap();
    assert!(used(&guest).is_empty());
    let fault = guest.handle.translate(ENDPOINT, 0x1008, Permissions::WRITE).unwrap_err();
    assert_eq!(used(&guest), [(0, 24)]);
    assert_eq!(report(&guest, BUFFERS), fault.encode());
    assert_eq!(report(&guest, BUFFERS)[..8], [2, 0, 0, 0, 2, 1, 0, 0]);
}

#[test]
fn fault_waits_for_a_buffer_that_is_large_enough() {
    let guest = guest();
    assert!(guest.handle.report_fault(FAULT));
    assert!(used(&guest).is_empty());
    give(&guest, 0, BUFFERS, 23);
    give(&guest, 1, BUFFERS + 0x100, 24);
    kick_events(&guest);
    assert_eq!(used(&guest), [(0, 0), (1, 24)]);
    assert_eq!(report(&guest, BUFFERS), [0; 24]);
    assert_eq!(report(&guest, BUFFERS + 0x100), FAULT.encode());
    assert_eq!(guest.handle.counters().faults_dropped, 0);
}

#[test]
fn faults_of_unknown_endpoint_or_in_a_flood_count_as_dropped() {
    let guest = guest();
    assert!(!guest.handle.report_fault(Fault { endpoint: 77, ..FAULT }));
    for _ in 0..1000 {
        guest.handle.report_fault(FAULT);
    }
    let counters = guest.handle.counters();
    assert!(counters.faults <= 64 && counters.faults_dropped >= 1001 - 64, "{counters:?}");
    guest.write(STATUS, &[0]);
    assert_eq!(guest.handle.counters().faults_dropped, 1001, "a reset also drops pending faults");
}

#[test]
fn event_buffer_outside_memory_needs_a_reset() {
    let guest = guest();
    give(&guest, 0, RAM as u64 - 4, 24);
    assert!(guest.handle.report_fault(FAULT));
    assert_eq!(guest.handle.counters().faults_dropped, 1);
    assert!(guest.handle.report_fault(FAULT));
    give(&guest, 1, u64::MAX - 4, 24);
    kick_events(&guest);
    assert_ne!(guest.status() & NEEDS_RESET, 0);
}

#[test]
fn driver_without_an_event_queue_is_left_alone() {
    let mut guest = Guest::running(BASIC);
    assert!(guest.handle.report_fault(FAULT));
    assert_eq!(guest.simple(&attach(ENDPOINT, 1)), OK);
    kick_events(&guest);
    assert_eq!(guest.status(), 15);
}

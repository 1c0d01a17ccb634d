// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of bounce windows with the whole device.

use std::sync::Arc;

use iommu_bounce::Permissions;
use iommu_bounce::spec::{Status, feature};
use iommu_bounce::test_utils::{attach, map, window_add, window_del};
use vm_memory::GuestAddress;

use super::{APERTURE, BAR, BASIC, CHUNK, DEVICE_CONFIG, ENDPOINT, Guest, OK, RAM, STATUS, params};
use crate::pci::PciDevice;
use crate::pci::regs::{COMMAND, COMMAND_BUS_MASTER, COMMAND_MEMORY};
use crate::ram::Ram;
use crate::virtio::iommu::{IommuError, create};
use crate::virtio::test_support::{FakeMsi, FakeSlots};

#[test]
fn window_chunk_appears_in_the_region_and_at_its_iova() {
    let mut guest = Guest::running(BASIC | feature::BOUNCE_WINDOW);
    assert_eq!([guest.config_u64(40), guest.config_u64(56), guest.config_u64(64)], [APERTURE, CHUNK, 4 * CHUNK]);
    assert_eq!(guest.simple(&attach(ENDPOINT, 1)), OK);
    let (used, reply) = guest.send_split(&window_add(1, 3, APERTURE), &[28], &[8, 4]);
    assert_eq!((used, reply[8]), (12, OK));
    let offset = u64::from_le_bytes(reply[..8].try_into().unwrap());
    let seen = guest.slots.at(BAR + offset).unwrap();
    let (reached, permissions) = guest.mapper.translate(APERTURE).unwrap();
    assert_eq!(reached, seen.address, "guest and device see different memory");
    assert_eq!(permissions, Permissions::READ | Permissions::WRITE);
    assert_eq!(guest.slots.load(BAR + offset), 0);
    guest.slots.store(BAR + offset, 1);
    assert_eq!(guest.simple(&window_del(1, APERTURE)), OK);
    assert!(guest.mapper.is_empty());
    assert_ne!(guest.slots.load(BAR + offset), 1);
}

#[test]
fn window_chunks_stay_in_budget_and_a_reset_frees_them() {
    let mut guest = Guest::running(BASIC | feature::BOUNCE_WINDOW);
    assert_eq!(guest.simple(&attach(ENDPOINT, 1)), OK);
    for index in 0..4u64 {
        let (_, reply) = guest.send(&window_add(1, 3, APERTURE + index * CHUNK), 12);
        assert_eq!(reply[8], OK);
        assert!(guest.handle.held_window_bytes() <= 4 * CHUNK);
    }
    let (used, reply) = guest.send(&window_add(1, 3, APERTURE + 4 * CHUNK), 12);
    assert_eq!((used, reply[8]), (12, Status::NoMem as u8));
    assert_eq!(reply[..8], [0xff; 8]);
    assert_eq!(guest.mapper.mapped_bytes(), 4 * CHUNK);
    guest.write(STATUS, &[0]);
    assert!(guest.mapper.is_empty());
    assert_eq!(guest.handle.counters().window_bytes, 0);
    guest.start(BASIC | feature::BOUNCE_WINDOW);
    assert_eq!(guest.simple(&attach(ENDPOINT, 1)), OK);
    for index in 0..4u64 {
        let (_, reply) = guest.send(&window_add(1, 3, APERTURE + index * CHUNK), 12);
        assert_eq!(reply[8], OK, "chunks that are being freed do not count");
    }
}

#[test]
fn reset_of_the_vm_parks_chunks_for_the_next_driver() {
    let mut guest = Guest::running(BASIC | feature::BOUNCE_WINDOW);
    assert_eq!(guest.simple(&attach(ENDPOINT, 1)), OK);
    let (_, first) = guest.send(&window_add(1, 3, APERTURE), 12);
    assert_eq!(guest.simple(&map(1, 0, 0xfff, 0x8000, 3)), OK);
    let offset = u64::from_le_bytes(first[..8].try_into().unwrap());
    guest.slots.store(BAR + offset, 0x5a);
    let reached = guest.mapper.translate(APERTURE).unwrap();
    PciDevice::reset(&*guest.function).unwrap();
    assert_eq!(guest.mapper.mappings().len(), 1, "only the chunk stays mapped");
    assert_ne!(guest.slots.load(BAR + offset), 0x5a);
    guest.function.write_config(COMMAND, &(COMMAND_BUS_MASTER | COMMAND_MEMORY).to_le_bytes());
    guest.write(STATUS, &[0]);
    guest.start(BASIC | feature::BOUNCE_WINDOW);
    let calls = guest.handle.counters().host_maps;
    assert_eq!(guest.simple(&attach(ENDPOINT, 3)), OK);
    let (_, second) = guest.send(&window_add(3, 3, APERTURE), 12);
    assert_eq!(first, second);
    assert_eq!(guest.handle.counters().host_maps, calls, "the chunk needs no new host mapping");
    assert_eq!(guest.mapper.translate(APERTURE), Some(reached));
    assert_eq!(guest.slots.load(BAR + offset), 0);
    guest.slots.store(BAR + offset, 1);
}

#[test]
fn driver_without_the_feature_sees_a_standard_device() {
    let mut guest = Guest::new(true);
    guest.start(BASIC);
    assert_eq!(guest.simple(&attach(ENDPOINT, 1)), OK);
    let (used, reply) = guest.send(&window_add(1, 3, APERTURE), 12);
    assert_eq!((used, reply), (0, vec![0xcc; 12]), "the device answered a request of an unknown type");
    assert_eq!(guest.simple(&map(1, APERTURE, APERTURE + 0xfff, 0x8000, 3)), OK);
    assert_eq!(guest.handle.held_window_bytes(), 0);
}

#[test]
fn changed_budget_notifies_only_a_driver_with_windows() {
    for (features, isr_bits) in [(BASIC, 0), (BASIC | feature::BOUNCE_WINDOW, 2)] {
        let mut guest = Guest::new(true);
        guest.start(features);
        let generation = |guest: &Guest| {
            let mut generation = [0];
            guest.function.read_bar(0, 21, &mut generation);
            generation[0]
        };
        let before = generation(&guest);
        guest.handle.set_budget(8 * CHUNK).unwrap();
        assert_eq!(guest.config_u64(64), 8 * CHUNK);
        assert_ne!(generation(&guest), before);
        let mut isr = [0];
        guest.function.read_bar(0, 0x1000, &mut isr);
        assert_eq!(isr[0], isr_bits);
        guest.handle.set_threshold(4096).unwrap();
        assert_eq!(guest.config_u64(72), 4096);
        guest.function.read_bar(0, 0x1000, &mut isr);
        assert_eq!(isr[0], isr_bits);
        guest.handle.set_threshold_write(2048).unwrap();
        assert_eq!(guest.config_u64(72), 4096 | 2048 << 32);
        guest.function.read_bar(0, 0x1000, &mut isr);
        assert_eq!(isr[0], isr_bits);
    }
    let guest = Guest::new(true);
    assert!(guest.handle.set_budget(9 * CHUNK).is_err(), "the budget exceeds the region");
    assert_eq!(guest.config_u64(64), 4 * CHUNK);
}

#[test]
fn configuration_is_read_only() {
    let guest = Guest::running(BASIC | feature::BOUNCE_WINDOW);
    let before: Vec<u64> = (0..10).map(|word| guest.config_u64(8 * word)).collect();
    for word in 0..10 {
        guest.write(DEVICE_CONFIG + 8 * word, &[0x5a; 8]);
    }
    let after: Vec<u64> = (0..10).map(|word| guest.config_u64(8 * word)).collect();
    assert_eq!(before, after);
}

#[test]
fn mismatched_window_memory_and_config_are_refused() {
    let memory = Arc::new(Ram::from_ranges(&[(GuestAddress(0), RAM)]).unwrap());
    let (msi, slots) = (Arc::new(FakeMsi::default()), Arc::new(FakeSlots::default()));
    let mut without_memory = params(&memory, &msi, &slots, true);
    without_memory.windows = None;
    assert!(matches!(create(without_memory), Err(IommuError::Engine(_))));
    let mut without_config = params(&memory, &msi, &slots, true);
    without_config.engine.window = None;
    assert!(matches!(create(without_config), Err(IommuError::Engine(_))));
    let mut odd = params(&memory, &msi, &slots, true);
    odd.windows.as_mut().unwrap().chunk_size = 3 << 20;
    assert!(matches!(create(odd), Err(IommuError::Windows(_))));
}

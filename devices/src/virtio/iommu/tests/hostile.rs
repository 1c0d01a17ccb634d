// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests with malicious drivers.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use iommu_bounce::spec::feature;
use iommu_bounce::test_utils::{attach, window_add};
use vm_memory::{Bytes, GuestAddress};

use super::{
    APERTURE, AVAILABLE, BASIC, BUFFERS, CHUNK, DESCRIPTORS, Descriptor, ENDPOINT, Guest, INDIRECT, NEEDS_RESET, NEXT,
    NOTIFY, OK, QUEUE_SIZE, RAM, STATUS, USED, WRITE,
};
use crate::pci::PciDevice;

/// Lets `describe` write an invalid queue. Checks that the device then needs a reset, and works after the reset.
fn hostile(describe: impl Fn(&mut Guest)) {
    hostile_with(BASIC, describe);
}

/// Does the same as [`hostile`], for a driver that has accepted `features`.
pub(super) fn hostile_with(features: u64, describe: impl Fn(&mut Guest)) {
    let mut guest = Guest::running(features);
    guest.memory.write_slice(&attach(ENDPOINT, 1), GuestAddress(BUFFERS)).unwrap();
    describe(&mut guest);
    guest.kick();
    assert_ne!(guest.status() & NEEDS_RESET, 0);
    guest.kick();
    guest.write(STATUS, &[0]);
    assert_eq!(guest.status(), 0);
    guest.start(BASIC);
    assert_eq!(guest.simple(&attach(ENDPOINT, 1)), OK, "the device works after a reset");
}

#[test]
fn buffers_outside_memory_need_a_reset() {
    for address in [RAM as u64, RAM as u64 - 1, u64::MAX, u64::MAX - 19, 1 << 63] {
        hostile(|guest| {
            guest.describe(0, (address, 20, NEXT, 1));
            guest.describe(1, (BUFFERS + 0x100, 4, WRITE, 0));
            guest.make_available(0);
        });
        hostile(|guest| {
            guest.describe(0, (BUFFERS, 20, NEXT, 1));
            guest.describe(1, (address, 4, WRITE, 0));
            guest.make_available(0);
        });
    }
}

#[test]
fn broken_chains_need_a_reset() {
    let chains: [&[(u16, Descriptor)]; 6] = [
        // Loop of one descriptor.
        &[(0, (BUFFERS, 4, NEXT, 0))],
        // Loop of two descriptors.
        &[(0, (BUFFERS, 4, NEXT, 1)), (1, (BUFFERS, 4, WRITE | NEXT, 0))],
        // Link to an index outside the table.
        &[(0, (BUFFERS, 20, NEXT, QUEUE_SIZE))],
        // Readable buffer after a writable buffer.
        &[(0, (BUFFERS, 4, WRITE | NEXT, 1)), (1, (BUFFERS, 20, 0, 0))],
        // Indirect table outside memory.
        &[(0, (RAM as u64, 32, INDIRECT, 0))],
        // Indirect table that contains itself.
        &[(0, (DESCRIPTORS, 32, INDIRECT, 0))],
    ];
    for chain in chains {
        hostile(|guest| {
            for (index, descriptor) in chain {
                guest.describe(*index, *descriptor);
            }
            guest.make_available(0);
        });
    }
}

#[test]
fn indirect_table_longer_than_the_queue_needs_a_reset() {
    hostile(|guest| {
        let table = BUFFERS + 0x1000;
        for index in 0u64..200 {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&BUFFERS.to_le_bytes());
            bytes[12..14].copy_from_slice(&NEXT.to_le_bytes());
            bytes[14..].copy_from_slice(&u16::try_from(index + 1).unwrap().to_le_bytes());
            guest.memory.write_slice(&bytes, GuestAddress(table + 16 * index)).unwrap();
        }
        guest.describe(0, (table, 16 * 200, INDIRECT, 0));
        guest.make_available(0);
    });
}

#[test]
fn heads_and_indices_out_of_bounds_need_a_reset() {
    hostile(|guest| guest.make_available(QUEUE_SIZE));
    hostile(|guest| guest.make_available(u16::MAX));
    hostile(|guest| guest.memory.write_obj(QUEUE_SIZE + 1, GuestAddress(AVAILABLE + 2)).unwrap());
    hostile(|guest| guest.memory.write_obj(u16::MAX, GuestAddress(AVAILABLE + 2)).unwrap());
}

#[test]
fn huge_buffers_are_cut_or_refused_without_harm() {
    let mut guest = Guest::running(BASIC);
    guest.memory.write_slice(&attach(ENDPOINT, 1), GuestAddress(BUFFERS)).unwrap();
    guest.describe(0, (BUFFERS, 20, NEXT, 1));
    guest.describe(1, (2 * BUFFERS, u32::MAX - 20, WRITE, 0));
    guest.make_available(0);
    guest.kick();
    assert_eq!(guest.status() & NEEDS_RESET, 0);
    assert_eq!(guest.last_used(), (0, 4));
    hostile(|guest| {
        guest.describe(0, (BUFFERS, u32::MAX, NEXT, 1));
        guest.describe(1, (BUFFERS, u32::MAX, WRITE, 0));
        guest.make_available(0);
    });
}

#[test]
fn random_rings_and_descriptors_do_no_harm() {
    let mut guest = Guest::running(BASIC | feature::BOUNCE_WINDOW);
    // A linear congruential generator with Knuth's MMIX constants is random enough, and yields the same sequence in every run.
    let mut seed = 7u64;
    let mut random = move |bound: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 20) % bound
    };
    for _ in 0..5_000 {
        for index in 0..QUEUE_SIZE {
            let address = [BUFFERS + random(0x200), DESCRIPTORS, USED, RAM as u64 - random(64), random(u64::MAX)];
            let address = address[usize::try_from(random(5)).unwrap()];
            let len = [random(80), random(1 << 32)][usize::from(random(16) == 0)];
            let flags = u16::try_from(random(4) | if random(32) == 0 { 4 } else { 0 }).unwrap();
            let next = u16::try_from(random(u64::from(QUEUE_SIZE) + 1)).unwrap();
            guest.describe(index, (address, u32::try_from(len).unwrap(), flags, next));
        }
        let requests = [attach(ENDPOINT, 1), window_add(1, 3, APERTURE + CHUNK * random(6))];
        guest.memory.write_slice(&requests[usize::try_from(random(2)).unwrap()], GuestAddress(BUFFERS)).unwrap();
        guest.make_available(u16::try_from(random(u64::from(QUEUE_SIZE))).unwrap());
        guest.kick();
        assert!(guest.handle.held_window_bytes() <= 4 * CHUNK);
        if guest.status() & NEEDS_RESET != 0 {
            guest.write(STATUS, &[0]);
            guest.start(BASIC | feature::BOUNCE_WINDOW);
        }
    }
    guest.write(STATUS, &[0]);
    assert!(guest.mapper.is_empty());
    guest.start(BASIC);
    assert_eq!(guest.simple(&attach(ENDPOINT, 1)), OK);
}

/// Value that sets a flag when the value is dropped, even if a test fails. Without the flag, the threads that watch the flag would never
/// end.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn resets_notifications_and_budget_changes_may_come_at_once() {
    let mut guest = Guest::running(BASIC | feature::BOUNCE_WINDOW);
    let done = AtomicBool::new(false);
    let (function, handle) = (guest.function.clone(), guest.handle.clone());
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                function.write_bar(0, NOTIFY, &[0, 0]);
                handle.counters();
            }
        });
        scope.spawn(|| {
            for chunks in (1..=8).cycle() {
                handle.set_budget(chunks * CHUNK).unwrap();
                if done.load(Ordering::Relaxed) {
                    break;
                }
            }
        });
        let _done = SetOnDrop(&done);
        for _ in 0..200 {
            assert_eq!(guest.simple(&attach(ENDPOINT, 1)), OK);
            guest.send(&window_add(1, 3, APERTURE), 12);
            guest.write(STATUS, &[0]);
            assert!(guest.mapper.is_empty());
            guest.start(BASIC | feature::BOUNCE_WINDOW);
        }
    });
}

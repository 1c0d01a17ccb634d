// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of indirect descriptor tables, and of the suppression of notifications and interrupts (virtio 1.3, sections 2.7.5.3, 2.7.7 and
//! 2.7.10).

use std::sync::atomic::{AtomicUsize, Ordering, fence};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use iommu_bounce::test_utils::{attach, map, probe, unmap};
use vm_memory::{Bytes, GuestAddress};

use super::hostile::hostile_with;
use super::{
    AVAILABLE, BASIC, BUFFERS, Descriptor, ENDPOINT, EVENT_IDX, Guest, INDIRECT, INDIRECT_DESC, NEEDS_RESET, NEXT, OK,
    QUEUE_SIZE, RAM, USED, WRITE,
};
use crate::pci::PciDevice;

/// Address of indirect tables. The address need not be a multiple of 16.
const TABLE: u64 = 0x18_0008;
/// Address of `avail_event`, after the elements of the used ring.
pub(super) const AVAIL_EVENT: u64 = USED + 4 + 8 * QUEUE_SIZE as u64;
/// Address of `used_event`, after the elements of the available ring.
const USED_EVENT: u64 = AVAILABLE + 4 + 2 * QUEUE_SIZE as u64;

/// Writes an indirect table.
fn table(guest: &Guest, at: u64, descriptors: &[Descriptor]) {
    for (index, (address, len, flags, next)) in (0u64..).zip(descriptors) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&address.to_le_bytes());
        bytes[8..12].copy_from_slice(&len.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        guest.memory.write_slice(&bytes, GuestAddress(at + 16 * index)).unwrap();
    }
}

/// Returns the size in bytes of a table with `descriptors` descriptors.
fn size(descriptors: usize) -> u32 {
    u32::try_from(16 * descriptors).unwrap()
}

/// Sends a request with an indirect table. The first `in_ring` bytes of the request have direct descriptors of one byte each. The table's
/// descriptors contain the remaining bytes. Returns the status.
fn send_by_table(guest: &mut Guest, request: &[u8], in_ring: u16) -> u8 {
    guest.memory.write_slice(request, GuestAddress(BUFFERS)).unwrap();
    guest.memory.write_slice(&[0xcc; 8], GuestAddress(2 * BUFFERS)).unwrap();
    for index in 0..in_ring {
        guest.describe(3 + index, (BUFFERS + u64::from(index), 1, NEXT, 4 + index));
    }
    let rest = u32::try_from(request.len()).unwrap() - u32::from(in_ring);
    let descriptors = [(BUFFERS + u64::from(in_ring), rest, NEXT, 2), (0, 0, 0, 0), (2 * BUFFERS, 4, WRITE, 0)];
    table(guest, TABLE, &descriptors);
    guest.describe(3 + in_ring, (TABLE, size(3), INDIRECT, 0));
    let before = guest.used_index();
    guest.make_available(3);
    guest.kick();
    assert_eq!(guest.used_index(), before.wrapping_add(1), "the request was not answered");
    assert_eq!(guest.last_used(), (3, 4));
    let mut reply = [0; 5];
    guest.memory.read_slice(&mut reply, GuestAddress(2 * BUFFERS)).unwrap();
    assert_eq!(reply[1..], [0, 0, 0, 0xcc]);
    reply[0]
}

#[test]
fn request_may_use_an_indirect_table() {
    let mut guest = Guest::running(BASIC | INDIRECT_DESC);
    assert_eq!(send_by_table(&mut guest, &attach(ENDPOINT, 1), 0), OK);
    assert_eq!(send_by_table(&mut guest, &map(1, 0, 0xfff, 0x8000, 3), 4), OK);
    assert_eq!(guest.mapper.mappings().len(), 1);
    // The device collects UNMAPs and the addresses of their replies. With an indirect table, these addresses must also be correct.
    assert_eq!(send_by_table(&mut guest, &unmap(1, 0, 0xfff), 2), OK);
    assert!(guest.mapper.is_empty());
    // This table is as long as the queue, and its descriptors are not in order.
    let request = probe(ENDPOINT);
    guest.memory.write_slice(&request, GuestAddress(BUFFERS)).unwrap();
    let mut descriptors: Vec<Descriptor> =
        (0..QUEUE_SIZE).map(|n| (2 * BUFFERS, 37, WRITE | NEXT, n - u16::from(n > 0))).collect();
    descriptors[0] = (BUFFERS, u32::try_from(request.len()).unwrap(), NEXT, QUEUE_SIZE - 1);
    descriptors[1].2 = WRITE;
    table(&guest, TABLE, &descriptors);
    guest.describe(0, (TABLE, size(descriptors.len()), INDIRECT, 0));
    guest.make_available(0);
    guest.kick();
    assert_eq!(guest.last_used(), (0, 516));
    assert_eq!(guest.handle.counters().failed.probe, 0);
}

#[test]
fn broken_tables_need_a_reset() {
    let readable = |next| (BUFFERS, 20, NEXT, next);
    let writable = (BUFFERS + 0x100, 4, WRITE, 0);
    let good = [readable(1), writable];
    let nested = [readable(1), (TABLE + 0x100, size(2), INDIRECT, 0)];
    let (circle, itself) = ([readable(1), (BUFFERS, 4, WRITE | NEXT, 0)], [readable(0)]);
    let (leads_out, backwards) = ([readable(2), writable], [(BUFFERS, 4, WRITE | NEXT, 1), (BUFFERS, 20, 0, 0)]);
    let buffer_outside = [readable(1), (RAM as u64 - 2, 4, WRITE, 0)];
    let tables: [(&[Descriptor], u64, u32); 12] = [
        // These tables have wrong contents.
        (&nested, TABLE, size(2)),
        (&circle, TABLE, size(2)),
        (&itself, TABLE, size(1)),
        (&leads_out, TABLE, size(2)),
        (&backwards, TABLE, size(2)),
        (&buffer_outside, TABLE, size(2)),
        // These tables have a wrong length.
        (&good, TABLE, 0),
        (&good, TABLE, 31),
        (&good, TABLE, size(1)),
        (&good, TABLE, !15),
        // This table is partly outside memory.
        (&good[..1], RAM as u64 - 16, size(2)),
        // This table is completely outside memory.
        (&[], u64::MAX - 15, size(2)),
    ];
    for (descriptors, at, len) in tables {
        hostile_with(BASIC | INDIRECT_DESC, |guest| {
            table(guest, at, descriptors);
            table(guest, TABLE + 0x100, &good);
            guest.describe(0, (at, len, INDIRECT, 0));
            guest.make_available(0);
        });
    }
}

#[test]
fn indirect_table_changed_while_served_does_no_harm() {
    let mut guest = Guest::running(BASIC | INDIRECT_DESC);
    let request = attach(ENDPOINT, 1);
    guest.memory.write_slice(&request, GuestAddress(BUFFERS)).unwrap();
    let good: [Descriptor; 3] =
        [(BUFFERS, 20, NEXT, 1), (BUFFERS + 0x100, 2, WRITE | NEXT, 2), (BUFFERS + 0x102, 2, WRITE, 0)];
    let bad: [Descriptor; 3] =
        [(RAM as u64, u32::MAX, NEXT, 0), (TABLE, 48, INDIRECT, 0), (u64::MAX, 2, WRITE | NEXT, 9)];
    table(&guest, TABLE, &good);
    guest.describe(0, (TABLE, size(3), INDIRECT, 0));
    let memory = guest.memory.clone();
    let (left, right) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        scope.spawn(|| {
            while right.load(Ordering::Relaxed) == 0 {
                for turn in 0..6 {
                    let descriptor = if turn < 3 { bad[turn] } else { good[turn - 3] };
                    let place = GuestAddress(TABLE + 16 * u64::try_from(turn % 3).unwrap());
                    memory.write_obj(descriptor.0, place).unwrap();
                    memory
                        .write_obj(
                            u64::from(descriptor.3) << 48 | u64::from(descriptor.2) << 32 | u64::from(descriptor.1),
                            GuestAddress(place.0 + 8),
                        )
                        .unwrap();
                }
                left.fetch_add(1, Ordering::Relaxed);
            }
        });
        while left.load(Ordering::Relaxed) == 0 {
            thread::yield_now();
        }
        for _ in 0..2000 {
            guest.make_available(0);
            guest.kick();
            if guest.status() & NEEDS_RESET != 0 {
                guest.write(super::STATUS, &[0]);
                guest.start(BASIC | INDIRECT_DESC);
            }
        }
        right.store(1, Ordering::Relaxed);
    });
    table(&guest, TABLE, &good);
    guest.start_again();
    guest.make_available(0);
    guest.kick();
    assert_eq!(guest.last_used(), (0, 4));
}

impl Guest {
    /// Resets the device, and starts its driver again.
    fn start_again(&mut self) {
        self.write(super::STATUS, &[0]);
        self.start(BASIC | INDIRECT_DESC);
    }

    fn avail_event(&self) -> u16 {
        self.memory.read_obj(GuestAddress(AVAIL_EVENT)).unwrap()
    }
}

#[test]
fn device_asks_for_a_notification_of_each_next_element() {
    let mut guest = Guest::running(BASIC | EVENT_IDX);
    // The index of the ring wraps around during this loop.
    for turn in 0u32..0x1_0010 {
        assert_eq!(u32::from(guest.avail_event()), turn & 0xffff, "the driver would not notify");
        guest.describe(0, (BUFFERS, 0, 0, 0));
        guest.make_available(0);
        guest.kick();
    }
    assert_eq!(guest.handle.counters().requests.invalid, 0x1_0010);
    // Without `EVENT_IDX`, the device must not write `avail_event`.
    let mut guest = Guest::running(BASIC);
    guest.simple(&attach(ENDPOINT, 1));
    assert_eq!(guest.avail_event(), 0);
}

#[test]
fn interrupts_follow_used_event_of_the_driver() {
    let mut guest = Guest::running(BASIC | EVENT_IDX);
    let vectors = guest.msi.vectors();
    guest.enable_vector();
    // With `EVENT_IDX`, the device ignores the flag in the available ring. `start` has set this flag.
    for (turn, wanted) in [(0u16, true), (1, false), (2, false), (3, true), (4, false)] {
        guest.memory.write_obj(if turn < 1 { 0u16 } else { 3 }, GuestAddress(USED_EVENT)).unwrap();
        let before = vectors.raised(1);
        guest.simple(&attach(ENDPOINT, 1));
        assert_eq!(vectors.raised(1) - before, u32::from(wanted), "turn {turn}");
    }
}

/// Runs a driver with several threads. Each thread adds requests under a lock, as real drivers do. If the device asks for a notification,
/// the thread notifies the device outside the lock. In the end, the device must have served all requests.
#[test]
fn driver_threads_that_notify_on_demand_lose_no_request() {
    const TURNS: usize = 3000;
    let mut guest = Guest::running(BASIC | EVENT_IDX);
    assert_eq!(guest.simple(&attach(ENDPOINT, 1)), OK);
    let (memory, function) = (guest.memory.clone(), guest.function.clone());
    memory.write_slice(&unmap(1, 0, 0xfff), GuestAddress(BUFFERS)).unwrap();
    for head in 0..QUEUE_SIZE / 2 {
        guest.describe(2 * head, (BUFFERS, 28, NEXT, 2 * head + 1));
        guest.describe(2 * head + 1, (2 * BUFFERS, 4, WRITE, 0));
    }
    let used = || memory.load::<u16>(GuestAddress(USED + 2), Ordering::Acquire).unwrap();
    // Next index of the available ring.
    let ring = Mutex::new(guest.available);
    let notified = AtomicUsize::new(0);
    let driver = || {
        for _ in 0..TURNS {
            let wanted = {
                let mut index = ring.lock().unwrap_or_else(PoisonError::into_inner);
                // Wait until one of the `QUEUE_SIZE / 2` descriptor chains is free.
                let began = Instant::now();
                while index.wrapping_sub(used()) >= QUEUE_SIZE / 2 {
                    assert!(began.elapsed().as_secs() < 60, "the device did not serve all requests");
                    thread::yield_now();
                }
                let place = AVAILABLE + 4 + 2 * u64::from(*index % QUEUE_SIZE);
                memory.write_obj(2 * (*index % (QUEUE_SIZE / 2)), GuestAddress(place)).unwrap();
                let new = index.wrapping_add(1);
                memory.store(new, GuestAddress(AVAILABLE + 2), Ordering::Release).unwrap();
                fence(Ordering::SeqCst);
                let event = memory.load::<u16>(GuestAddress(AVAIL_EVENT), Ordering::Relaxed).unwrap();
                let wanted = new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(*index);
                *index = new;
                wanted
            };
            if wanted {
                notified.fetch_add(1, Ordering::Relaxed);
                function.write_bar(0, super::NOTIFY, &[0, 0]);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(driver);
        }
    });
    // When the last notification has returned, the device has served all requests.
    let total = u64::try_from(3 * TURNS).unwrap();
    assert_eq!(guest.handle.counters().requests.unmap, total);
    assert_eq!(u64::from(used()), (total + 1) & 0xffff);
    assert!(notified.into_inner() <= 3 * TURNS);
    assert_eq!(guest.status() & NEEDS_RESET, 0);
}

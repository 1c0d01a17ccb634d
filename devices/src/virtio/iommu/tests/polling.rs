// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the polling thread. The driver notifies the device only when the device asks for a notification.

use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use iommu_bounce::test_utils::{attach, map, unmap};
use virtio_bindings::bindings::virtio_ring::VRING_USED_F_NO_NOTIFY;
use vm_memory::{Bytes, GuestAddress};

use super::super::contention::Contention;
use super::rings::AVAIL_EVENT;
use super::{BASIC, BUFFERS, ENDPOINT, EVENT_IDX, Guest, NEEDS_RESET, NEXT, OK, STATUS, USED, WRITE};
use crate::pci::PciDevice;
use crate::virtio::test_support::{SOON, set_bus_master};

/// Maximum time that a test waits for the device. A longer wait fails the test.
const LONG: Duration = Duration::from_secs(120);

fn running() -> Guest {
    running_with(BASIC)
}

fn running_with(features: u64) -> Guest {
    let mut guest = Guest::with(false, true);
    guest.start(features);
    assert_eq!(ask(&mut guest, &attach(ENDPOINT, 1)), (OK, true));
    guest
}

/// Spins until `done` returns true, as a driver spins until an answer arrives.
fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < LONG, "{what}");
        std::hint::spin_loop();
    }
}

fn notifications_wanted(guest: &Guest) -> bool {
    fence(Ordering::SeqCst);
    if guest.event_idx {
        let event: u16 = guest.memory.load(GuestAddress(AVAIL_EVENT), Ordering::Relaxed).unwrap();
        return event == guest.available.wrapping_sub(1);
    }
    let flags: u16 = guest.memory.load(GuestAddress(USED), Ordering::Relaxed).unwrap();
    u32::from(flags) & VRING_USED_F_NO_NOTIFY == 0
}

/// Returns true if the device wants a notification of the driver's next request.
fn next_is_notified(guest: &Guest) -> bool {
    if guest.event_idx {
        return guest.memory.load::<u16>(GuestAddress(AVAIL_EVENT), Ordering::Acquire).unwrap() == guest.available;
    }
    notifications_wanted(guest)
}

/// Adds a request to the queue. If the device wants a notification, notifies the device and returns true.
fn put(guest: &mut Guest, request: &[u8], len: u32) -> bool {
    guest.memory.write_slice(request, GuestAddress(BUFFERS)).unwrap();
    guest.describe(0, (BUFFERS, len, NEXT, 1));
    guest.describe(1, (2 * BUFFERS, 4, WRITE, 0));
    guest.make_available(0);
    let wanted = notifications_wanted(guest);
    if wanted {
        guest.kick();
    }
    wanted
}

/// Sends a request and waits for the answer. Returns the status, and true if the request needed a notification.
fn ask(guest: &mut Guest, request: &[u8]) -> (u8, bool) {
    let before = guest.used_index();
    let notified = put(guest, request, u32::try_from(request.len()).unwrap());
    wait_for("an answer", || guest.memory.load::<u16>(GuestAddress(USED + 2), Ordering::Acquire).unwrap() != before);
    (guest.memory.read_obj(GuestAddress(2 * BUFFERS)).unwrap(), notified)
}

/// Sends requests until at least `count` of them were answered without a notification.
fn make_polled(guest: &mut Guest, count: usize) {
    let (start, mut polled) = (Instant::now(), 0);
    while polled < count {
        assert!(start.elapsed() < LONG, "{polled} requests were polled for");
        for request in [map(1, 0x1000, 0x1fff, 0x8000, 3), unmap(1, 0x1000, 0x1fff)] {
            let (status, notified) = ask(guest, &request);
            assert_eq!(status, OK);
            polled += usize::from(!notified);
        }
    }
}

#[test]
fn requests_that_come_fast_need_no_notifications() {
    for features in [BASIC, BASIC | EVENT_IDX] {
        let mut guest = running_with(features);
        make_polled(&mut guest, 200);
        assert!(guest.mapper.is_empty());
        assert_eq!(guest.handle.counters().requests.map, guest.handle.counters().requests.unmap);
    }
}

#[test]
fn requests_wait_while_bus_mastering_is_off() {
    for (features, polled) in [(BASIC, false), (BASIC | EVENT_IDX, false), (BASIC, true), (BASIC | EVENT_IDX, true)] {
        let mut guest = running_with(features);
        assert_eq!(ask(&mut guest, &map(1, 0x5000, 0x5fff, 0x8000, 3)).0, OK);
        if polled {
            make_polled(&mut guest, 1);
        }
        set_bus_master(&guest.function, false);
        let before = guest.used_index();
        put(&mut guest, &unmap(1, 0x5000, 0x5fff), 28);
        guest.kick();
        std::thread::sleep(SOON);
        assert_eq!(guest.used_index(), before);
        // Devices behind the virtio-iommu keep their mappings while the virtio-iommu's bus mastering is off.
        assert_eq!(guest.mapper.mapped_bytes(), 0x1000);
        set_bus_master(&guest.function, true);
        wait_for("an answer", || {
            guest.memory.load::<u16>(GuestAddress(USED + 2), Ordering::Acquire).unwrap() != before
        });
        assert!(guest.mapper.is_empty());
        assert_eq!(ask(&mut guest, &map(1, 0x5000, 0x5fff, 0x8000, 3)).0, OK);
    }
}

#[test]
fn idle_poller_asks_for_notifications_again() {
    let mut guest = running();
    make_polled(&mut guest, 1);
    wait_for("notifications", || notifications_wanted(&guest));
    assert_eq!(ask(&mut guest, &map(1, 0x1000, 0x1fff, 0x8000, 3)), (OK, true));
    assert_eq!(ask(&mut guest, &unmap(1, 0x1000, 0x1fff)).0, OK);
    make_polled(&mut guest, 1);
}

#[test]
fn infrequent_cheap_requests_are_not_polled_for_forever() {
    let mut guest = running();
    make_polled(&mut guest, 1);
    // Slow requests make the polling time long, so that later requests arrive well within the polling time.
    guest.mapper.delay(Duration::from_millis(1));
    make_polled(&mut guest, 100);
    guest.mapper.delay(Duration::ZERO);
    let bad = map(77, 0x1000, 0x1fff, 0x8000, 3);
    let polled = (0..200).filter(|_| {
        std::thread::sleep(Duration::from_millis(2));
        !ask(&mut guest, &bad).1
    });
    let polled = polled.count();
    assert!(polled < 100, "{polled} requests were polled for");
}

#[test]
fn forbidden_poller_stops_polling() {
    let mut guest = running();
    for _ in 0..3 {
        make_polled(&mut guest, 1);
        guest.handle.allow_polling(false);
        let polled = polled_of_many(&mut guest);
        // The thread may just have begun to poll, so it may still serve some requests by polling.
        assert!(polled < 20, "{polled} requests were polled for");
        guest.handle.allow_polling(true);
    }
}

/// Sends 200 requests. Returns the number of requests that needed no notification.
fn polled_of_many(guest: &mut Guest) -> usize {
    let requests = (0..100).flat_map(|_| [map(1, 0x1000, 0x1fff, 0x8000, 3), unmap(1, 0x1000, 0x1fff)]);
    requests
        .filter(|request| {
            let (status, notified) = ask(guest, request);
            assert_eq!(status, OK);
            !notified
        })
        .count()
}

#[test]
fn thread_that_stepped_back_polls_again_when_the_time_is_over() {
    let mut guest = running();
    make_polled(&mut guest, 1);
    let now = Instant::now();
    guest.handle.device().queues().set_contention(Contention::exits(now + LONG * 10));
    // The thread may still poll until it has served a request.
    let polled = polled_of_many(&mut guest);
    assert!(polled < 20, "{polled} requests were polled for");
    assert_eq!(polled_of_many(&mut guest), 0);
    guest.handle.device().queues().set_contention(Contention::exits(now));
    make_polled(&mut guest, 1);
}

#[test]
fn reset_while_polling_releases_the_queue() {
    let mut guest = running();
    for _ in 0..20 {
        make_polled(&mut guest, 1);
        guest.write(STATUS, &[0]);
        guest.memory.write_slice(&[0xaa; 0x100], GuestAddress(USED)).unwrap();
        guest.make_available(0);
        std::thread::sleep(Duration::from_millis(1));
        let mut used = [0; 0x100];
        guest.memory.read_slice(&mut used, GuestAddress(USED)).unwrap();
        assert_eq!(used, [0xaa; 0x100], "the used ring was written after the reset");
        guest.start(BASIC);
        assert_eq!(ask(&mut guest, &attach(ENDPOINT, 1)), (OK, true));
    }
}

#[test]
fn pause_serves_all_requests_and_stops_polling_until_resume() {
    for features in [BASIC, BASIC | EVENT_IDX] {
        let mut guest = running_with(features);
        for _ in 0..20 {
            make_polled(&mut guest, 1);
            let before = guest.used_index();
            let request = map(1, 0x5000, 0x5fff, 0x8000, 3);
            put(&mut guest, &request, u32::try_from(request.len()).unwrap());
            guest.function.pause();
            assert_eq!(guest.used_index(), before.wrapping_add(1), "an earlier request is served");
            assert!(next_is_notified(&guest));
            let served = guest.function.save().unwrap().payload["common"]["queues"][0]["served"].clone();
            assert_eq!(served["next_avail"], guest.available);
            // After the pause, the thread must not access the queue. Wait, so that the test detects such an access.
            std::thread::sleep(Duration::from_millis(1));
            assert!(next_is_notified(&guest));
            guest.function.resume();
            assert_eq!(ask(&mut guest, &unmap(1, 0x5000, 0x5fff)), (OK, true));
        }
    }
}

#[test]
fn broken_chain_found_by_polling_needs_a_reset() {
    let mut guest = running();
    loop {
        make_polled(&mut guest, 1);
        // The buffer is outside guest memory. Repeat until the device asks for no notification, so that the polling thread finds the chain.
        guest.describe(0, (1 << 40, 20, NEXT, 1));
        guest.make_available(0);
        if !notifications_wanted(&guest) {
            break;
        }
        guest.kick();
        assert_ne!(guest.status() & NEEDS_RESET, 0);
        guest.write(STATUS, &[0]);
        guest.start(BASIC);
        assert_eq!(ask(&mut guest, &attach(ENDPOINT, 1)).0, OK);
    }
    wait_for("the status", || guest.status() & NEEDS_RESET != 0);
    guest.write(STATUS, &[0]);
    guest.start(BASIC);
    assert_eq!(ask(&mut guest, &attach(ENDPOINT, 1)), (OK, true));
}

#[test]
fn device_dropped_while_polling_ends_its_thread() {
    let mut guest = running();
    make_polled(&mut guest, 1);
    let memory = std::sync::Arc::downgrade(&guest.memory);
    drop(guest);
    assert!(memory.upgrade().is_none(), "guest memory is still in use");
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of long requests during a pause or reset of the device.

use std::time::{Duration, Instant};

use iommu_bounce::test_utils::{attach, map, unmap};

use super::*;

/// Maximum time that a test waits for the device. A longer wait fails the test.
const LONG: Duration = Duration::from_secs(120);

/// Returns a MAP that the engine splits into two host mappings.
fn long_map() -> Vec<u8> {
    map(1, 0, 2 * PIECE - 1, 0, 3)
}

/// Returns a running device that interrupts long requests. If `poll` is true, a thread may poll for requests.
fn interrupted(features: u64, poll: bool) -> Guest {
    let mut guest = Guest::with(false, poll);
    guest.start(features);
    assert_eq!(guest.simple(&attach(ENDPOINT, 1)), OK);
    guest.handle.interrupt(true);
    guest
}

/// Adds a request to the queue and notifies the device.
fn put(guest: &mut Guest, request: &[u8]) {
    guest.memory.write_slice(request, GuestAddress(BUFFERS)).unwrap();
    guest.describe(0, (BUFFERS, u32::try_from(request.len()).unwrap(), NEXT, 1));
    guest.describe(1, (2 * BUFFERS, 4, WRITE, 0));
    guest.make_available(0);
    guest.kick();
}

fn wait_for_answer(guest: &Guest, before: u16) {
    let start = Instant::now();
    while guest.memory.load::<u16>(GuestAddress(USED + 2), Ordering::Acquire).unwrap() == before {
        assert!(start.elapsed() < LONG, "the device did not answer in time");
        thread::yield_now();
    }
    assert_eq!(guest.memory.read_obj::<u8>(GuestAddress(2 * BUFFERS)).unwrap(), OK);
}

#[test]
fn interrupted_request_is_served_after_resume() {
    for (features, poll) in [(BASIC, false), (BASIC, true), (BASIC | EVENT_IDX, false), (BASIC | EVENT_IDX, true)] {
        let mut guest = interrupted(features, poll);
        let before = guest.used_index();
        put(&mut guest, &long_map());
        guest.function.pause();
        guest.handle.interrupt(false);
        assert_eq!(guest.used_index(), before);
        assert!(guest.mapper.is_empty());
        guest.function.resume();
        wait_for_answer(&guest, before);
        assert_eq!(guest.mapper.mapped_bytes(), 2 * PIECE);
        // The driver notifies the device of the next request as usual.
        assert_eq!(guest.simple(&unmap(1, 0, 2 * PIECE - 1)), OK);
    }
}

#[test]
fn request_left_by_the_polling_thread_is_served_after_resume() {
    let mut guest = interrupted(BASIC, true);
    guest.handle.interrupt(false);
    for _ in 0..50 {
        assert_eq!(guest.simple(&map(1, 0, 0xfff, 0, 3)), OK);
        assert_eq!(guest.simple(&unmap(1, 0, 0xfff)), OK);
    }
    guest.mapper.delay(Duration::from_millis(20));
    let before = guest.used_index();
    thread::scope(|scope| {
        let (handle, mapper) = (guest.handle.clone(), guest.mapper.clone());
        scope.spawn(move || {
            while mapper.is_empty() {
                thread::yield_now();
            }
            handle.interrupt(true);
        });
        put(&mut guest, &long_map());
    });
    guest.function.pause();
    guest.handle.interrupt(false);
    guest.function.resume();
    wait_for_answer(&guest, before);
    assert_eq!(guest.mapper.mapped_bytes(), 2 * PIECE);
}

#[test]
fn restored_device_serves_an_interrupted_request() {
    let mut old = interrupted(BASIC, false);
    let before = old.used_index();
    put(&mut old, &long_map());
    old.function.pause();
    let state = old.function.save().unwrap();
    let new = Guest::new(false);
    let mut bytes = vec![0; RAM];
    old.memory.read_slice(&mut bytes, GuestAddress(0)).unwrap();
    new.memory.write_slice(&bytes, GuestAddress(0)).unwrap();
    new.function.restore(&state).unwrap();
    assert!(new.mapper.is_empty());
    new.function.resume();
    wait_for_answer(&new, before);
    assert_eq!(new.mapper.mapped_bytes(), 2 * PIECE);
}

#[test]
fn reset_drops_an_interrupted_request() {
    let mut guest = interrupted(BASIC, true);
    put(&mut guest, &long_map());
    guest.function.reset().unwrap();
    guest.handle.interrupt(false);
    assert!(guest.mapper.is_empty());
    guest.function.write_config(COMMAND, &(COMMAND_BUS_MASTER | COMMAND_MEMORY).to_le_bytes());
    guest.start(BASIC);
    assert_eq!(guest.simple(&attach(ENDPOINT, 1)), OK);
    assert_eq!(guest.simple(&long_map()), OK);
}

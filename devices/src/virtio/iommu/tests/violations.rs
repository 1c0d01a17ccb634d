// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Drivers that break a rule of virtqueues: each case names the section of virtio 1.4. `docs/virtio-conformance.md` lists them.
//!
//! Where nothing says what the device must do, it serves the request as it reads it or asks for a reset; what it must not is to reach
//! anything but RAM, or to be of no use to the next driver.

use iommu_bounce::test_utils::attach;
use vm_memory::{Bytes, GuestAddress};

use super::{
    AVAILABLE, BASIC, BUFFERS, DESCRIPTORS, Descriptor, ENDPOINT, Guest, INDIRECT, INDIRECT_DESC, NEEDS_RESET, NEXT,
    OK, QUEUE_SIZE, RAM, STATUS, USED, WRITE,
};

/// Where the table of an indirect descriptor is.
const TABLE: u64 = 0x18_0000;

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Served,
    NeedsReset,
}

/// Has the device see what `break_rule` makes of a queue, and a driver that keeps to the rules come after it.
fn fate(features: u64, break_rule: impl FnOnce(&mut Guest)) -> Fate {
    let mut guest = Guest::running(features);
    guest.memory.write_slice(&attach(ENDPOINT, 1), GuestAddress(BUFFERS)).unwrap();
    break_rule(&mut guest);
    guest.kick();
    let fate = if guest.status() & NEEDS_RESET != 0 { Fate::NeedsReset } else { Fate::Served };
    guest.write(STATUS, &[0]);
    assert_eq!(guest.status(), 0);
    guest.start(BASIC);
    assert_eq!(guest.simple(&attach(ENDPOINT, 1)), OK, "a reset mends it");
    fate
}

fn table(guest: &Guest, descriptors: &[Descriptor]) {
    for (place, (address, len, flags, next)) in (TABLE..).step_by(16).zip(descriptors) {
        let rest = u64::from(*next) << 48 | u64::from(*flags) << 32 | u64::from(*len);
        guest.memory.write_slice(&[address.to_le_bytes(), rest.to_le_bytes()].concat(), GuestAddress(place)).unwrap();
    }
}

const REQUEST: Descriptor = (BUFFERS, 20, NEXT, 1);
const REPLY: Descriptor = (2 * BUFFERS, 4, WRITE, 0);

#[test]
fn malformed_indirect_descriptor_is_served_or_needs_a_reset() {
    let inner = [REQUEST, REPLY];
    let nested = [(TABLE, 32, INDIRECT, 0)];
    let nested_behind = [REQUEST, (TABLE, 32, INDIRECT | WRITE, 0)];
    let cases: [(&str, u64, u16, &[Descriptor], Fate); 5] = [
        ("2.7.5.3.2: WRITE beside INDIRECT is ignored", INDIRECT_DESC, INDIRECT | WRITE, &inner, Fate::Served),
        ("2.7.5.3.1: NEXT beside INDIRECT", INDIRECT_DESC, INDIRECT | NEXT, &inner, Fate::Served),
        ("2.7.5.3.1: a table in a table", INDIRECT_DESC, INDIRECT, &nested, Fate::NeedsReset),
        ("2.7.5.3.1: a table behind a buffer of a table", INDIRECT_DESC, INDIRECT, &nested_behind, Fate::NeedsReset),
        ("2.7.5.3.1: a table and the feature was not accepted", 0, INDIRECT, &inner, Fate::Served),
    ];
    for (case, features, flags, descriptors, expected) in cases {
        let came = fate(BASIC | features, |guest| {
            table(guest, descriptors);
            let len = u32::try_from(16 * descriptors.len()).unwrap();
            // What NEXT would lead to is a buffer outside RAM.
            guest.describe(0, (TABLE, len, flags, 7));
            guest.describe(7, (u64::MAX - 64, 4, WRITE, 0));
            guest.make_available(0);
        });
        assert_eq!(came, expected, "{case}");
    }
}

#[test]
fn buffers_and_rings_that_lie_in_each_other_do_no_harm() {
    let request = |guest: &mut Guest, readable: u64, writable: u64| {
        guest.describe(0, (readable, 20, NEXT, 1));
        guest.describe(1, (writable, 4, WRITE, 0));
        guest.make_available(0);
    };
    // 2.7: each part of a queue is memory of its own, and no buffer is part of it.
    for place in [DESCRIPTORS, AVAILABLE, USED] {
        fate(BASIC, |guest| request(guest, BUFFERS, place));
        fate(BASIC, |guest| request(guest, place, 2 * BUFFERS));
    }
    let rings = [
        [DESCRIPTORS, DESCRIPTORS, USED],
        [DESCRIPTORS, AVAILABLE, AVAILABLE],
        [DESCRIPTORS, AVAILABLE, DESCRIPTORS],
        [DESCRIPTORS; 3],
    ];
    for rings in rings {
        fate(BASIC, |guest| {
            guest.write(STATUS, &[0]);
            guest.start_in(BASIC, rings);
            request(guest, BUFFERS, 2 * BUFFERS);
        });
    }
}

/// 2.7.13.1: the driver puts heads of descriptor chains in the ring, once each.
#[test]
fn head_that_is_there_several_times_is_served_as_often() {
    let mut guest = Guest::running(BASIC);
    guest.memory.write_slice(&attach(ENDPOINT, 1), GuestAddress(BUFFERS)).unwrap();
    guest.describe(0, REQUEST);
    guest.describe(1, REPLY);
    for _ in 0..QUEUE_SIZE {
        guest.make_available(0);
    }
    guest.kick();
    assert_eq!((guest.used_index(), guest.status() & NEEDS_RESET), (QUEUE_SIZE, 0));
    assert_eq!(guest.handle.counters().requests.attach, u64::from(QUEUE_SIZE));
}

/// 2.7.13: buffers are in memory that the device may reach. Where RAM has a hole, registers of devices may be.
#[test]
fn buffer_across_a_hole_between_regions_of_ram_needs_a_reset() {
    let (hole, second) = (RAM as u64, 2 * RAM as u64);
    for place in [hole - 4, hole, hole + 0x1000, second - 4] {
        for (readable, writable) in [(place, 2 * BUFFERS), (BUFFERS, place)] {
            let mut guest = Guest::of(&[(0, RAM), (second, RAM)]);
            guest.start(BASIC);
            guest.memory.write_slice(&attach(ENDPOINT, 1), GuestAddress(BUFFERS)).unwrap();
            guest.describe(0, (readable, 20, NEXT, 1));
            // As long as the hole and more: both of its ends are RAM.
            guest.describe(1, (writable, u32::try_from(RAM + 8).unwrap(), WRITE, 0));
            guest.make_available(0);
            guest.kick();
            let across = readable == place || place != hole - 4;
            assert_eq!(guest.status() & NEEDS_RESET != 0, across, "{readable:#x} {writable:#x}");
        }
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests with drivers that break a rule of virtqueues. Each case names the section of virtio 1.4 that contains the rule.
//! `docs/virtio-conformance.md` lists the cases.
//!
//! Where the specification leaves the device's behaviour open, the device either serves the request with the values that it reads, or asks
//! for a reset. The device must access only RAM, and must always work for the next driver.

use iommu_bounce::test_utils::attach;
use vm_memory::{Bytes, GuestAddress};

use super::{
    AVAILABLE, BASIC, BUFFERS, DESCRIPTORS, Descriptor, ENDPOINT, Guest, INDIRECT, INDIRECT_DESC, NEEDS_RESET, NEXT,
    OK, QUEUE_SIZE, RAM, STATUS, USED, WRITE,
};

/// Address of indirect tables.
const TABLE: u64 = 0x18_0000;

/// Outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Served,
    NeedsReset,
}

/// Lets `break_rule` write an invalid queue, and notifies the device. Then resets the device, and checks that the device works for a
/// correct driver. Returns the outcome of the request in the invalid queue.
fn fate(features: u64, break_rule: impl FnOnce(&mut Guest)) -> Fate {
    let mut guest = Guest::running(features);
    guest.memory.write_slice(&attach(ENDPOINT, 1), GuestAddress(BUFFERS)).unwrap();
    break_rule(&mut guest);
    guest.kick();
    let fate = if guest.status() & NEEDS_RESET != 0 { Fate::NeedsReset } else { Fate::Served };
    guest.write(STATUS, &[0]);
    assert_eq!(guest.status(), 0);
    guest.start(BASIC);
    assert_eq!(guest.simple(&attach(ENDPOINT, 1)), OK, "the device works after a reset");
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
        ("2.7.5.3.2: WRITE with INDIRECT is ignored", INDIRECT_DESC, INDIRECT | WRITE, &inner, Fate::Served),
        ("2.7.5.3.1: NEXT with INDIRECT", INDIRECT_DESC, INDIRECT | NEXT, &inner, Fate::Served),
        ("2.7.5.3.1: a table in a table", INDIRECT_DESC, INDIRECT, &nested, Fate::NeedsReset),
        ("2.7.5.3.1: a table after a buffer of a table", INDIRECT_DESC, INDIRECT, &nested_behind, Fate::NeedsReset),
        ("2.7.5.3.1: a table without the accepted feature", 0, INDIRECT, &inner, Fate::Served),
    ];
    for (case, features, flags, descriptors, expected) in cases {
        let came = fate(BASIC | features, |guest| {
            table(guest, descriptors);
            let len = u32::try_from(16 * descriptors.len()).unwrap();
            // If the device followed NEXT, the next descriptor would describe a buffer outside RAM.
            guest.describe(0, (TABLE, len, flags, 7));
            guest.describe(7, (u64::MAX - 64, 4, WRITE, 0));
            guest.make_available(0);
        });
        assert_eq!(came, expected, "{case}");
    }
}

#[test]
fn overlapping_buffers_and_rings_do_no_harm() {
    let request = |guest: &mut Guest, readable: u64, writable: u64| {
        guest.describe(0, (readable, 20, NEXT, 1));
        guest.describe(1, (writable, 4, WRITE, 0));
        guest.make_available(0);
    };
    // 2.7: the parts of a queue must not overlap each other or a buffer.
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

/// 2.7.13.1: the driver must add each head of a descriptor chain to the ring only once.
#[test]
fn head_added_several_times_is_served_as_often() {
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

/// 2.7.13: buffers must be in memory that the device may access. A hole in RAM may contain device registers.
#[test]
fn buffer_across_a_hole_between_regions_of_ram_needs_a_reset() {
    let (hole, second) = (RAM as u64, 2 * RAM as u64);
    for place in [hole - 4, hole, hole + 0x1000, second - 4] {
        for (readable, writable) in [(place, 2 * BUFFERS), (BUFFERS, place)] {
            let mut guest = Guest::of(&[(0, RAM), (second, RAM)]);
            guest.start(BASIC);
            guest.memory.write_slice(&attach(ENDPOINT, 1), GuestAddress(BUFFERS)).unwrap();
            guest.describe(0, (readable, 20, NEXT, 1));
            // The writable buffer is longer than the hole, so both ends of the buffer may be in RAM.
            guest.describe(1, (writable, u32::try_from(RAM + 8).unwrap(), WRITE, 0));
            guest.make_available(0);
            guest.kick();
            let across = readable == place || place != hole - 4;
            assert_eq!(guest.status() & NEEDS_RESET != 0, across, "{readable:#x} {writable:#x}");
        }
    }
}

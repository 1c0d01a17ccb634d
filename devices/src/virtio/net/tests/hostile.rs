// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests with drivers that break rules.

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::harness::{BUFFERS, Harness, RECEIVE, RINGS, TRANSMIT, frame};
use crate::virtio::net::fuzzing;
use crate::virtio::test_driver::{NEXT, WRITE};

#[test]
fn broken_rule_fails_the_device_until_reset() {
    for (queue, address, len, flags) in [
        (TRANSMIT, BUFFERS, 64, WRITE),
        (TRANSMIT, 1 << 40, 64, 0),
        (TRANSMIT, BUFFERS, 64, NEXT),
        (RECEIVE, BUFFERS, 2048, 0),
        (RECEIVE, 1 << 40, 2048, WRITE),
        (RECEIVE, BUFFERS, 64, WRITE | NEXT),
    ] {
        let mut harness = Harness::new(1, false);
        harness.start(true);
        harness.chain_to_nowhere(queue, (address, len, flags));
        harness.ring(queue);
        harness.give(0, &frame(100));
        harness.fails_until_reset(queue);
    }
}

#[test]
fn looped_chain_fails_the_device() {
    let mut harness = Harness::new(1, false);
    harness.start(true);
    // Make the descriptors a loop.
    harness.add(TRANSMIT, &[(BUFFERS, 64, 0)]);
    let table = RINGS.of(TRANSMIT)[0];
    harness.ram.write_obj(NEXT, GuestAddress(table + 12)).unwrap();
    harness.ram.write_obj(0u16, GuestAddress(table + 14)).unwrap();
    harness.ring(TRANSMIT);
    harness.broken();
}

#[test]
fn available_index_beyond_queue_size_fails_the_device() {
    for queue in [RECEIVE, TRANSMIT] {
        let mut harness = Harness::new(1, false);
        harness.start(true);
        harness.ram.write_obj(17u16, GuestAddress(RINGS.of(queue)[1] + 2)).unwrap();
        harness.ring(queue);
        harness.give(0, &frame(100));
        harness.broken();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn random_bytes_in_any_queue_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..0x2000)) {
        fuzzing::run(&bytes);
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests with drivers that break rules.

use proptest::prelude::*;
use vm_memory::{Bytes, GuestAddress};

use super::harness::{BUFFERS, Harness, RECEIVE, RINGS, TRANSMIT, frame};
use crate::virtio::net::fuzzing;
use crate::virtio::test_driver::{NEXT, WRITE};

#[test]
fn driver_that_breaks_a_rule_is_told_to_reset_and_can() {
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
fn ring_that_names_the_same_chain_again_and_again_ends() {
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
fn index_that_is_further_than_the_queue_is_long_is_refused() {
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
    fn any_bytes_in_any_queue_are_lived_through(bytes in prop::collection::vec(any::<u8>(), 0..0x2000)) {
        fuzzing::run(&bytes);
    }
}

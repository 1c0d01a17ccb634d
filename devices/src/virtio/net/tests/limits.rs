// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the rate limit.

use std::time::Duration;

use super::harness::{BUFFERS, Harness, RECEIVE, TRANSMIT, frame};
use crate::pci::PciDevice;
use crate::rate_limit::{BucketParams, RateLimits};
use crate::virtio::test_driver::{WRITE, wait_until};

fn limits(size: u64, refill_time: Duration) -> Option<RateLimits> {
    Some(RateLimits { ops: None, bandwidth: Some(BucketParams { size, one_time_burst: 0, refill_time }) })
}

#[test]
fn rate_limits_are_per_direction_and_delay_without_loss() {
    // The budget is at most 1000 bytes, and refills at 100 bytes per 10 ms.
    let mut harness = Harness::limited(1, false, limits(1000, Duration::from_millis(100)));
    harness.start(true);
    for index in 0..8 {
        harness.add(RECEIVE, &[(BUFFERS + 0x800 * index, 2048, WRITE)]);
    }
    harness.ring(RECEIVE);
    let start = std::time::Instant::now();
    for _ in 0..4 {
        harness.give(0, &frame(1000));
    }
    harness.wait_used(RECEIVE, 4);
    // The fourth packet must wait until the whole budget has been refilled three times.
    assert!(start.elapsed() >= Duration::from_millis(200), "{:?}", start.elapsed());
    assert!(harness.bytes(BUFFERS + 0x1800 + 12, 1000) == frame(1000));
    // The other direction still has its full budget.
    for count in 1..=4 {
        harness.send(&frame(1000));
        assert_eq!(harness.receive(&mut [0; 2048]), 1012);
        harness.wait_used(TRANSMIT, count);
    }
    assert!(start.elapsed() >= Duration::from_millis(400), "{:?}", start.elapsed());
    let counters = harness.device.counters();
    assert!((1..100).contains(&counters.rate_waits), "{counters:?}");
    assert_eq!((counters.rx_dropped, counters.tx_dropped), (0, 0));
}

#[test]
fn rate_limited_packet_delays_neither_pause_nor_reset() {
    let mut harness = Harness::limited(1, false, limits(1, Duration::from_secs(3600)));
    harness.start(true);
    for index in 0..2 {
        harness.add(RECEIVE, &[(BUFFERS + 0x800 * index, 2048, WRITE)]);
    }
    harness.ring(RECEIVE);
    harness.give(0, &frame(100));
    harness.give(0, &frame(100));
    harness.wait_used(RECEIVE, 1);
    harness.send(&frame(100));
    harness.wait_used(TRANSMIT, 1);
    harness.send(&frame(100));
    wait_until(|| harness.device.counters().rate_waits >= 2);
    harness.function.pause();
    assert_eq!((harness.used(RECEIVE), harness.used(TRANSMIT)), (1, 1));
    harness.function.save().unwrap();
    harness.function.resume();
    harness.function.reset().unwrap();
    assert_eq!(harness.status(), 0);
    // The refill takes an hour. A queue that waits for the refill must not check the budget again and again.
    assert!(harness.device.counters().rate_waits < 20);
}

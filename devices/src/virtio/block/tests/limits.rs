// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A limit on the rate: who waits, and that nobody waits for who waits.

use std::time::{Duration, Instant};

use super::harness::*;
use crate::pci::PciDevice;
use crate::rate_limit::{BucketParams, RateLimits};
use crate::virtio::block::spec::{request, status};

const BYTES: usize = 1 << 20;

fn bucket(size: u64, refill_time: Duration) -> Option<BucketParams> {
    Some(BucketParams { size, one_time_burst: 0, refill_time })
}

/// Of requests and of bytes: one passes, and none for an hour.
fn stopped() -> [RateLimits; 2] {
    let hour = Duration::from_secs(3600);
    [RateLimits { ops: bucket(1, hour), bandwidth: None }, RateLimits { ops: None, bandwidth: bucket(512, hour) }]
}

#[test]
fn request_that_is_held_back_keeps_neither_pause_nor_reset_nor_unmap_waiting_and_stays_in_the_queue() {
    for (kind, limits) in kinds().flat_map(|kind| stopped().map(|limits| (kind, limits))) {
        let kind = Kind { limits: Some(limits), ..kind };
        let mut old = Harness::new(kind, file(&pattern(BYTES, 0)));
        assert_eq!(old.call(request::IN, 0, &[(DATA, 512)]), status::OK);
        let held = old.add(0, request::IN, 1, &[(DATA + 0x1000, 512)]);
        old.ring(0);
        wait_until(|| old.device.counters().rate_waits != 0);
        if kind.translated {
            old.unmap(DATA + 0x2000, 0x1000);
        }
        old.function.pause();
        assert_eq!((old.used(0), old.byte(held)), (1, 0xff));
        // A saved one is begun by the disk that is made of it, whose bucket is full.
        let state = old.function.save().unwrap();
        let mut new = Harness::silent(kind, old.content.try_clone().unwrap(), BYTES as u64);
        new.fill(0, &old.bytes(0, RAM));
        new.map_all();
        new.added.clone_from(&old.added);
        new.function.restore(&state).unwrap();
        new.function.resume();
        new.served(0);
        assert_eq!(
            (new.byte(held), new.bytes(DATA + 0x1000, 512)),
            (status::OK, pattern(BYTES, 0)[512..1024].to_vec())
        );
        old.function.resume();
        old.function.reset().unwrap();
        assert_eq!(old.status(), 0);
    }
}

#[test]
fn queues_share_the_limit_and_requests_pass_at_its_rate() {
    let limits = RateLimits { ops: bucket(10, Duration::from_millis(100)), bandwidth: None };
    let kind = Kind { queues: 2, limits: Some(limits), ..RING };
    let mut disk = Harness::new(kind, file(&pattern(BYTES, 0)));
    let start = Instant::now();
    for sector in 0..15 {
        disk.add(0, request::IN, sector, &[(DATA, 512)]);
        disk.add(1, request::IN, sector, &[(DATA, 512)]);
    }
    disk.ring(0);
    disk.ring(1);
    disk.served(0);
    disk.served(1);
    // 10 at once, 20 more at 100 a second.
    assert!(start.elapsed() >= Duration::from_millis(200), "{:?}", start.elapsed());
    let counters = disk.device.counters();
    // Woken now and then by the other, a queue looks some times for each request, but does not spin.
    assert!(counters.read_ops == 30 && (1..2000).contains(&counters.rate_waits), "{counters:?}");
}

#[test]
fn all_kinds_of_requests_count_and_bytes_of_reads_and_writes() {
    let limits = RateLimits { bandwidth: bucket(1024, Duration::from_secs(3600)), ops: None };
    let mut disk = Harness::new(Kind { limits: Some(limits), ..RING }, file(&pattern(BYTES, 0)));
    assert_eq!(disk.call(request::FLUSH, 0, &[]), status::OK);
    assert_eq!(disk.call_ranges(request::DISCARD, &[(0, 1024, 0)]), status::OK);
    assert_eq!(disk.call(request::OUT, 0, &[(DATA, 512)]), status::OK);
    // The last token lets it pass, whatever it costs.
    assert_eq!(disk.call(request::IN, 0, &[(DATA, 4096)]), status::OK);
    disk.add(0, request::FLUSH, 0, &[]);
    disk.ring(0);
    wait_until(|| disk.device.counters().rate_waits != 0);
    assert_eq!(disk.device.counters().flushes, 1);
}

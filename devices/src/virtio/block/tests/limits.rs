// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the rate limit and of the limits on requests under way. A request that exceeds a limit waits, but does not block a pause, a
//! reset or an UNMAP.

use std::time::{Duration, Instant};

use iommu_bounce::{DmaMapper, Permissions};
use vm_memory::{GuestAddress, GuestMemoryBackend};

use super::harness::*;
use crate::pci::PciDevice;
use crate::rate_limit::{BucketParams, RateLimits};
use crate::virtio::block::spec::{request, status};

const BYTES: usize = 1 << 20;

fn bucket(size: u64, refill_time: Duration) -> Option<BucketParams> {
    Some(BucketParams { size, one_time_burst: 0, refill_time })
}

/// Returns two alternatives: a limit on requests, and a limit on bytes. With each of these limits, the first request passes immediately,
/// and the next request passes only after an hour.
fn stopped() -> [RateLimits; 2] {
    let hour = Duration::from_secs(3600);
    [RateLimits { ops: bucket(1, hour), bandwidth: None }, RateLimits { ops: None, bandwidth: bucket(512, hour) }]
}

#[test]
fn held_request_stays_queued_and_blocks_no_pause_reset_or_unmap() {
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
        // The request is saved with the queue. The restored disk's rate limiter starts with a full bucket, so the disk serves the request.
        let mut new = Harness::silent(kind, old.content.try_clone().unwrap(), BYTES as u64);
        new.map_all();
        new.restore_from(&old);
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
    // 10 requests pass immediately. The other 20 requests pass at a rate of 100 per second, which takes 200 ms.
    assert!(start.elapsed() >= Duration::from_millis(200), "{:?}", start.elapsed());
    let counters = disk.device.counters();
    // When a queue's thread wakes up, the other queue may already have used the tokens. So a thread may wait a few times for one request. A
    // thread that polled the rate limiter would wait far more often.
    assert!(counters.read_ops == 30 && (1..2000).contains(&counters.rate_waits), "{counters:?}");
}

#[test]
fn only_read_and_write_data_uses_up_the_bandwidth_limit() {
    let limits = RateLimits { bandwidth: bucket(1024, Duration::from_secs(3600)), ops: None };
    let mut disk = Harness::new(Kind { limits: Some(limits), ..RING }, file(&pattern(BYTES, 0)));
    assert_eq!(disk.call(request::FLUSH, 0, &[]), status::OK);
    assert_eq!(disk.call_ranges(request::DISCARD, &[(0, 1024, 0)]), status::OK);
    assert_eq!(disk.call(request::OUT, 0, &[(DATA, 512)]), status::OK);
    // While tokens are left, a request of any size passes.
    assert_eq!(disk.call(request::IN, 0, &[(DATA, 4096)]), status::OK);
    // Without tokens, even a request without data waits.
    disk.add(0, request::FLUSH, 0, &[]);
    disk.ring(0);
    wait_until(|| disk.device.counters().rate_waits != 0);
    assert_eq!(disk.device.counters().flushes, 1);
}

/// First IOVA of a range in which each MiB maps to the same 1 MiB of RAM.
const ALIASES: u64 = 0x4000_0000;
const MIB: u64 = 1 << 20;
/// Maximum size of a request in MiB.
const MOST_MIB: u64 = 256;

/// Creates a disk of `mib` MiB behind an IOMMU, and maps enough buffers for a request of `mib` MiB.
fn with_large_buffers(kind: Kind, mib: u64) -> Harness {
    let image = tempfile::tempfile().unwrap();
    image.set_len(mib * MIB).unwrap();
    let mut disk = Harness::new(Kind { translated: true, ..kind }, image);
    let all = Permissions::READ | Permissions::WRITE;
    for at in 0..mib {
        let slice = disk.ram.get_slice(GuestAddress(DATA), BYTES).unwrap();
        disk.mapper.as_mut().unwrap().map(ALIASES + at * MIB, slice, all).unwrap();
    }
    disk
}

/// Returns a buffer of `bytes` bytes for [`Harness::add`].
fn buffer(bytes: u64) -> (u64, u32) {
    (ALIASES - OFFSET, u32::try_from(bytes).unwrap())
}

#[test]
fn pause_waits_for_few_large_requests_not_the_whole_queue() {
    for kind in [PLAIN, RING] {
        let mut disk = with_large_buffers(kind, MOST_MIB);
        // Each request takes three descriptors.
        for _ in 0..u64::from(QUEUE_SIZE) / 3 {
            disk.add(0, request::IN, 0, &[buffer(MOST_MIB * MIB)]);
        }
        disk.ring(0);
        wait_until(|| disk.used(0) != 0);
        disk.function.pause();
        assert_ne!(disk.used(0), disk.added[0], "{kind:?}: the last requests stay in the queue");
        disk.function.resume();
        disk.served(0);
        assert_eq!(disk.device.counters().errors, 0);
    }
}

#[test]
fn oversized_request_fails() {
    for kind in [PLAIN, RING] {
        let mut disk = with_large_buffers(kind, MOST_MIB + 1);
        assert_eq!(disk.call(request::IN, 0, &[buffer(MOST_MIB * MIB)]), status::OK, "{kind:?}");
        assert_eq!(disk.call(request::IN, 0, &[buffer(MOST_MIB * MIB + 512)]), status::IOERR, "{kind:?}");
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Driver that fills its rings, descriptors and buffers with the fuzzer's bytes, for fuzzing and for replaying fuzzer findings.

use std::sync::Arc;

use super::counters::{BalloonCounters, Counts};
use super::spec::feature;
use super::traffic::{QUEUES, Traffic};
use crate::reclaim::Reclaim;
use crate::virtio::byte_driver::{ByteDriver, Layout, split_choice};
use crate::virtio::queue_table::TableTask;
use crate::worker::Task;

/// Writes `bytes` to the guest's rings, descriptors and buffers piece by piece. After each piece, the device serves the queues. The first
/// byte selects the driver's features and the host's page size.
///
/// # Panics
/// The device returned more memory to the host than the driver's requests covered, or a counter is wrong.
pub fn run(bytes: &[u8]) {
    let (first, bytes) = split_choice(bytes);
    let guest = ByteDriver::new(Layout::queues(0x4_0000, 0x2000));
    let features = if first & 2 != 0 { feature::REPORTING } else { 0 };
    let page = if first & 4 != 0 { 0x1_0000 } else { 0x1000 };
    let counts = Arc::new(Counts::default());
    let traffic = Traffic::new(Arc::new(Reclaim::new(guest.ram.clone(), page)), counts.clone());
    let mut traffic = TableTask::new(traffic, guest.driver(features), QUEUES);
    guest.start_queues(&mut traffic, QUEUES, first & 1 != 0);
    guest.feed(bytes, |_, orders| _ = traffic.run(orders));
    let BalloonCounters { inflated_bytes, reported_bytes, given_back_bytes, kept_back_bytes, refused_bytes, .. } =
        counts.read();
    assert_eq!(refused_bytes, 0);
    assert!(given_back_bytes.is_multiple_of(page));
    assert!(given_back_bytes + kept_back_bytes <= inflated_bytes + reported_bytes);
    assert!(features != 0 || reported_bytes == 0);
}

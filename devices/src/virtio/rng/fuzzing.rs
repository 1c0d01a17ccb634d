// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Driver that fills its rings, descriptors and buffers with the fuzzer's bytes, for fuzzing and for replaying fuzzer findings.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::counters::Counts;
use super::requests::{MOST_BYTES, Requests};
use crate::virtio::byte_driver::{ByteDriver, Layout};
use crate::virtio::queue_table::TableTask;
use crate::worker::Task;

/// Writes `bytes` to the guest's rings, descriptors and buffers piece by piece. After each piece, the device serves the queue. The lowest
/// bit of the first byte selects whether the queue uses EVENT_IDX.
///
/// # Panics
/// The device gave the guest more bytes than allowed.
pub fn run(bytes: &[u8]) {
    let source = File::open("/dev/zero").expect("every host has /dev/zero");
    let guest = ByteDriver::new(Layout::ONE_QUEUE);
    let counts = Arc::new(Counts::default());
    let mut requests = TableTask::new(Requests::new(Arc::new(source), counts.clone()), guest.driver(0), 1);
    guest.start_queues(&mut requests, 1, bytes.first().is_some_and(|byte| byte & 1 != 0));
    let rounds = guest.feed(bytes, |_, orders| _ = requests.run(orders));
    assert!(counts.bytes.load(Ordering::Relaxed) <= MOST_BYTES as u64 * 0x1_0000 * rounds);
}

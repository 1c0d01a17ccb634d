// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Driver that fills its rings, descriptors and buffers with the fuzzer's bytes, for fuzzing and for replaying fuzzer findings.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::counters::Counts;
use super::requests::Requests;
use crate::virtio::byte_driver::{ByteDriver, Layout};
use crate::virtio::queue_table::TableTask;
use crate::worker::Task;

/// Writes `bytes` to the guest's rings, descriptors and buffers piece by piece. After each piece, the device serves the queue. The first
/// byte selects whether the queue uses EVENT_IDX, and whether the device has a file. Flushes of that file fail.
///
/// # Panics
/// The device has counted more flushes than there can have been requests.
pub fn run(bytes: &[u8]) {
    let choice = bytes.first().copied().unwrap_or(0);
    // This file is a character device, so each flush fails.
    let file = (choice & 2 != 0).then(|| Arc::new(File::open("/dev/zero").expect("every host has /dev/zero")));
    let guest = ByteDriver::new(Layout::ONE_QUEUE);
    let counts = Arc::new(Counts::default());
    let mut requests = TableTask::new(Requests::new(file, counts.clone()), guest.driver(0), 1);
    guest.start_queues(&mut requests, 1, choice & 1 != 0);
    let rounds = guest.feed(bytes, |_, orders| _ = requests.run(orders));
    let flushes = counts.flushes.load(Ordering::Relaxed) + counts.errors.load(Ordering::Relaxed);
    assert!(flushes <= 0x1_0000 * rounds);
}

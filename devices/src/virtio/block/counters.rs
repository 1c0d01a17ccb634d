// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a disk counts.

use std::sync::atomic::{AtomicU64, Ordering};

/// What the device has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockCounters {
    /// Reads that were answered with OK.
    pub read_ops: u64,
    /// Bytes that they read.
    pub read_bytes: u64,
    /// Writes that were answered with OK.
    pub write_ops: u64,
    /// Bytes that they wrote.
    pub write_bytes: u64,
    /// Flushes that were answered with OK.
    pub flushes: u64,
    /// Discards that were answered with OK.
    pub discards: u64,
    /// Requests to write zeroes that were answered with OK.
    pub write_zeroes: u64,
    /// Requests that were answered with an error: the driver's mistakes, and what the host could not do.
    pub errors: u64,
    /// Of these, the ones that the host could not do.
    pub host_errors: u64,
    /// How often a queue has waited because of the limit on the rate.
    pub rate_waits: u64,
}

/// The same, as workers count.
#[derive(Default)]
pub(super) struct Counts {
    pub(super) read_ops: AtomicU64,
    pub(super) read_bytes: AtomicU64,
    pub(super) write_ops: AtomicU64,
    pub(super) write_bytes: AtomicU64,
    pub(super) flushes: AtomicU64,
    pub(super) discards: AtomicU64,
    pub(super) write_zeroes: AtomicU64,
    pub(super) errors: AtomicU64,
    pub(super) host_errors: AtomicU64,
    pub(super) rate_waits: AtomicU64,
}

impl Counts {
    pub(super) fn read(&self) -> BlockCounters {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        BlockCounters {
            read_ops: read(&self.read_ops),
            read_bytes: read(&self.read_bytes),
            write_ops: read(&self.write_ops),
            write_bytes: read(&self.write_bytes),
            flushes: read(&self.flushes),
            discards: read(&self.discards),
            write_zeroes: read(&self.write_zeroes),
            errors: read(&self.errors),
            host_errors: read(&self.host_errors),
            rate_waits: read(&self.rate_waits),
        }
    }
}

/// Counts one more.
pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a virtio-rng device counts.

use std::sync::atomic::{AtomicU64, Ordering};

/// What the device has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RngCounters {
    /// Requests that were served.
    pub requests: u64,
    /// Random bytes that they got.
    pub bytes: u64,
    /// How often the source could not be read.
    pub source_errors: u64,
}

/// The same, as the worker counts.
#[derive(Default)]
pub(super) struct Counts {
    pub(super) requests: AtomicU64,
    pub(super) bytes: AtomicU64,
    pub(super) source_errors: AtomicU64,
}

impl Counts {
    pub(super) fn read(&self) -> RngCounters {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        RngCounters {
            requests: read(&self.requests),
            bytes: read(&self.bytes),
            source_errors: read(&self.source_errors),
        }
    }
}

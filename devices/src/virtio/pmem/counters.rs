// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a virtio-pmem device counts.

use std::sync::atomic::{AtomicU64, Ordering};

/// What the device has done since it was made. Reads and writes of the memory leave the guest for nothing, and are not seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PmemCounters {
    /// Flushes that were done.
    pub flushes: u64,
    /// Flushes at which the host failed, as the driver was told.
    pub errors: u64,
}

/// The same, as the worker counts.
#[derive(Default)]
pub(super) struct Counts {
    pub(super) flushes: AtomicU64,
    pub(super) errors: AtomicU64,
}

impl Counts {
    pub(super) fn read(&self) -> PmemCounters {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        PmemCounters { flushes: read(&self.flushes), errors: read(&self.errors) }
    }
}

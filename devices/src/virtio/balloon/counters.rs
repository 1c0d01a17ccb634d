// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a virtio-balloon device counts.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::reclaim::Reclaimed;

/// What the device has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BalloonCounters {
    /// Bytes that the guest put into the balloon.
    pub inflated_bytes: u64,
    /// Bytes that it took out.
    pub deflated_bytes: u64,
    /// Bytes that it reported as free.
    pub reported_bytes: u64,
    /// Bytes of those in the balloon and of the free ones that the host has got.
    pub given_back_bytes: u64,
    /// Bytes that it has not got as a device of the host had them pinned, or as they were parts of huge pages.
    pub kept_back_bytes: u64,
    /// Bytes that the host did not take.
    pub refused_bytes: u64,
}

/// The same, as the worker counts.
#[derive(Default)]
pub(super) struct Counts {
    pub(super) inflated: AtomicU64,
    pub(super) deflated: AtomicU64,
    pub(super) reported: AtomicU64,
    given_back: AtomicU64,
    kept_back: AtomicU64,
    refused: AtomicU64,
}

impl Counts {
    /// Notes what became of pages.
    pub(super) fn note(&self, Reclaimed { given_back, kept_back, refused }: Reclaimed) {
        self.given_back.fetch_add(given_back, Ordering::Relaxed);
        self.kept_back.fetch_add(kept_back, Ordering::Relaxed);
        self.refused.fetch_add(refused, Ordering::Relaxed);
    }

    pub(super) fn read(&self) -> BalloonCounters {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        BalloonCounters {
            inflated_bytes: read(&self.inflated),
            deflated_bytes: read(&self.deflated),
            reported_bytes: read(&self.reported),
            given_back_bytes: read(&self.given_back),
            kept_back_bytes: read(&self.kept_back),
            refused_bytes: read(&self.refused),
        }
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a virtio-balloon device counts.

use std::sync::atomic::Ordering;

use crate::counters::counters;
use crate::reclaim::Reclaimed;

counters! {
    /// Counters of the device since it was made.
    BalloonCounters {
        inflated_bytes: "Bytes that the guest put into the balloon.",
        deflated_bytes: "Bytes that it took out.",
        reported_bytes: "Bytes that it reported as free.",
        given_back_bytes: "Bytes of either that the host has got.",
        kept_back_bytes: "Bytes of either that the guest keeps: a device of the host has them pinned, or they are parts of huge pages.",
        refused_bytes: "Bytes of either that the host did not take.",
    }
}

impl Counts {
    /// Notes what became of pages.
    pub(super) fn note(&self, Reclaimed { given_back, kept_back, refused }: Reclaimed) {
        self.given_back_bytes.fetch_add(given_back, Ordering::Relaxed);
        self.kept_back_bytes.fetch_add(kept_back, Ordering::Relaxed);
        self.refused_bytes.fetch_add(refused, Ordering::Relaxed);
    }
}

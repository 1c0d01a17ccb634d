// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Counters of a virtio-balloon device.

use std::sync::atomic::Ordering;

use crate::counters::counters;
use crate::reclaim::Reclaimed;

counters! {
    /// Counters of the device. All counters are 0 when the device is created.
    BalloonCounters {
        inflated_bytes: "Bytes that the guest added to the balloon.",
        deflated_bytes: "Bytes that the guest removed from the balloon.",
        reported_bytes: "Bytes that the guest reported as free.",
        given_back_bytes: "Ballooned and free bytes that were returned to the host.",
        kept_back_bytes: "Ballooned and free bytes that stay allocated: a host device has pinned them, or they are parts of huge pages.",
        refused_bytes: "Ballooned and free bytes that the host refused to take back.",
    }
}

impl Counts {
    /// Adds the result of one reclaim operation to the counters.
    pub(super) fn note(&self, Reclaimed { given_back, kept_back, refused }: Reclaimed) {
        self.given_back_bytes.fetch_add(given_back, Ordering::Relaxed);
        self.kept_back_bytes.fetch_add(kept_back, Ordering::Relaxed);
        self.refused_bytes.fetch_add(refused, Ordering::Relaxed);
    }
}

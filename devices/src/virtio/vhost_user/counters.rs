// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Counters of the front end of a vhost-user device. The guest's requests bypass the front end, so the front end cannot count the requests.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::counters::counters;

counters! {
    /// Counters of the device's servers since the device was created.
    VhostUserCounters {
        server_connections: "Connections to servers that were made.",
        server_losses: "Connections to servers that were lost.",
        server_refusals: "Requests that servers refused.",
    }
}

impl Counts {
    pub(super) fn add(count: &AtomicU64) {
        count.fetch_add(1, Ordering::Relaxed);
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the front end of a vhost-user device counts. Requests of the guest do not come its way.

use std::sync::atomic::{AtomicU64, Ordering};

/// What has become of the device's server since the device was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VhostUserCounters {
    /// Connections to a server that were made: one, and one for each time that it was lost and found again.
    pub connections: u64,
    /// Connections that were lost: the server closed them, was silent for too long, or broke the protocol.
    pub losses: u64,
    /// Requests that a server refused.
    pub refusals: u64,
}

/// The same, as threads count.
#[derive(Default)]
pub(super) struct Counts {
    pub(super) connections: AtomicU64,
    pub(super) losses: AtomicU64,
    pub(super) refusals: AtomicU64,
}

impl Counts {
    pub(super) fn read(&self) -> VhostUserCounters {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        VhostUserCounters {
            connections: read(&self.connections),
            losses: read(&self.losses),
            refusals: read(&self.refusals),
        }
    }

    pub(super) fn add(count: &AtomicU64) {
        count.fetch_add(1, Ordering::Relaxed);
    }
}

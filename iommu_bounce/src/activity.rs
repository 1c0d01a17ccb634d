// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Figures about one domain or endpoint.

use std::time::Duration;

use serde::Serialize;

use crate::counters::RequestCounts;
use crate::histogram::Histogram;
use crate::wire::Kind;

/// Requests that concern one domain or endpoint, since it exists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Activity {
    /// Requests by kind.
    pub requests: RequestCounts,
    /// Of these, the ones whose status was not `OK`.
    pub failed: RequestCounts,
    /// How long they took, host calls included.
    pub latency: Histogram,
}

impl Activity {
    pub(crate) fn note(&mut self, kind: Kind, ok: bool, took: Duration) {
        self.requests.add(kind);
        if !ok {
            self.failed.add(kind);
        }
        self.latency.record(took);
    }
}

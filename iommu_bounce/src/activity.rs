// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Counts and durations of the requests for one domain or endpoint.

use serde::Serialize;

use crate::counters::RequestCounts;
use crate::histogram::Histogram;
use crate::wire::Kind;

/// Requests for one domain or endpoint, counted since the domain or endpoint was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Activity {
    /// Requests by kind.
    pub requests: RequestCounts,
    /// Requests whose status was not `OK`, by kind.
    pub failed: RequestCounts,
    /// Duration of requests, including host calls.
    pub latency: Histogram,
}

impl Activity {
    /// Counts a request that took `ns` nanoseconds.
    pub(crate) fn note(&mut self, kind: Kind, ok: bool, ns: u64) {
        self.requests.add(kind);
        if !ok {
            self.failed.add(kind);
        }
        self.latency.record_ns(ns);
    }
}

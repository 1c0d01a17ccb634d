// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Time between requests, measured while the thread polls for requests.

use std::time::Duration;

/// Maximum time that the thread polls for requests. By default, KVM polls for at most the same time before a vCPU sleeps (Linux,
/// `halt_poll_ns`).
pub(super) const MOST: Duration = Duration::from_micros(200);

/// Average time until the next request. Zero until the first request has arrived.
#[derive(Debug, Default)]
pub(super) struct Gap(pub(super) Duration);

impl Gap {
    /// Returns the time to poll for the next request.
    pub(super) fn poll_time(&self) -> Duration {
        if self.0.is_zero() { MOST } else { MOST.min(self.0 * 2) }
    }

    /// Records that the thread polled for `time` until a request arrived.
    pub(super) fn came(&mut self, time: Duration) {
        self.0 = if self.0.is_zero() { time } else { (self.0 * 3 + time) / 4 };
    }

    /// Records that no request arrived within the polling time. Doubles the average time, up to [`MOST`].
    pub(super) fn missed(&mut self) {
        self.0 = MOST.min(self.0 * 2);
    }
}

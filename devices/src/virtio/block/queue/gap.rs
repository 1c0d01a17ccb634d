// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Time that requests take to come, while the thread looks for them.

use std::time::Duration;

/// Longest time that the thread looks, which is as long as KVM looks before a vCPU sleeps (Linux, `halt_poll_ns`).
pub(super) const MOST: Duration = Duration::from_micros(200);

/// Average time that requests take to come. It is zero until the first one came.
#[derive(Debug, Default)]
pub(super) struct Gap(pub(super) Duration);

impl Gap {
    /// Time to look for the next request.
    pub(super) fn patience(&self) -> Duration {
        if self.0.is_zero() { MOST } else { MOST.min(self.0 * 2) }
    }

    /// A request came after this time.
    pub(super) fn came(&mut self, time: Duration) {
        self.0 = if self.0.is_zero() { time } else { (self.0 * 3 + time) / 4 };
    }

    /// No request came in time. When it will come is unknown: it is taken for twice as late as those before.
    pub(super) fn missed(&mut self) {
        self.0 = MOST.min(self.0 * 2);
    }
}

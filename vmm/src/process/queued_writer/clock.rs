// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Clock for callers that wait for a queue.

use std::sync::{Condvar, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::State;

/// Clock that measures the time limits of waits.
pub(super) trait Clock: Send + Sync {
    /// Returns the current time.
    fn now(&self) -> Instant;

    /// Waits until `changed` is notified, but at most `limit`.
    fn wait<'a>(&self, changed: &Condvar, state: MutexGuard<'a, State>, limit: Duration) -> MutexGuard<'a, State>;
}

/// The host's clock.
pub(super) struct HostClock;

impl Clock for HostClock {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn wait<'a>(&self, changed: &Condvar, state: MutexGuard<'a, State>, limit: Duration) -> MutexGuard<'a, State> {
        changed.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Time as a queue's callers see it while they wait.

use std::sync::{Condvar, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::State;

/// A clock, and a way to wait by it.
pub(super) trait Clock: Send + Sync {
    /// Time now.
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

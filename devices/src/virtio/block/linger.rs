// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How long a queue's thread goes on looking for requests before it sleeps.
//!
//! A driver that has its answers soon adds the next requests. Where these come while the thread still looks, neither has to wake the
//! other: no exit of the guest, no switch between threads. So the thread lingers for as long as requests were seen to take to come, and
//! not at all where they take longer than is worth a CPU.

use std::time::{Duration, Instant};

/// Longest time for which the thread looks.
const MOST: Duration = Duration::from_micros(50);

/// The first time, where requests come soon.
const LEAST: Duration = Duration::from_micros(8);

/// How long to look, by how long requests took to come.
#[derive(Default)]
pub(super) struct Linger {
    patience: Duration,
    /// Since when there has been nothing to do.
    idle_since: Option<Instant>,
}

impl Linger {
    /// How long to look for requests from `now` on, when there is nothing to do; no time: sleep at once.
    pub(super) fn begin(&mut self, now: Instant) -> Duration {
        // The thread may have been woken meanwhile for something else.
        self.idle_since.get_or_insert(now);
        self.patience
    }

    /// Requests have come.
    pub(super) fn ended(&mut self, now: Instant) {
        if let Some(since) = self.idle_since.take() {
            self.learn(now.saturating_duration_since(since));
        }
    }

    /// Whether requests are waited for, so that the time at which they come is worth a look at the clock.
    pub(super) fn is_idle(&self) -> bool {
        self.idle_since.is_some()
    }

    /// Requests took so long to come.
    fn learn(&mut self, time: Duration) {
        if time > MOST {
            self.patience /= 2;
            if self.patience < LEAST {
                self.patience = Duration::ZERO;
            }
        } else if time > self.patience {
            self.patience = (self.patience * 2).clamp(LEAST, MOST);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(linger: &mut Linger, micros: u64) -> Duration {
        let start = Instant::now();
        linger.begin(start);
        linger.ended(start + Duration::from_micros(micros));
        linger.begin(start)
    }

    #[test]
    fn thread_does_not_linger_before_requests_came_soon() {
        assert_eq!(Linger::default().begin(Instant::now()), Duration::ZERO);
        assert_eq!(after(&mut Linger::default(), 51), Duration::ZERO);
    }

    #[test]
    fn requests_that_come_soon_have_it_linger_until_they_are_seen() {
        let mut linger = Linger::default();
        let times = [40, 40, 40, 40, 40].map(|micros| {
            let patience = after(&mut linger, micros);
            linger.idle_since = None;
            patience.as_micros()
        });
        assert_eq!(times, [8, 16, 32, 50, 50]);
    }

    #[test]
    fn requests_that_take_long_have_it_linger_less_and_then_not_at_all() {
        let mut linger = Linger { patience: MOST, idle_since: None };
        let times = [1000, 1000, 1000].map(|micros| {
            let patience = after(&mut linger, micros);
            linger.idle_since = None;
            patience.as_micros()
        });
        assert_eq!(times, [25, 12, 0]);
    }

    #[test]
    fn time_counts_from_when_there_was_nothing_to_do_whatever_wakes_the_thread_meanwhile() {
        let mut linger = Linger { patience: MOST, idle_since: None };
        let start = Instant::now();
        linger.begin(start);
        linger.begin(start + Duration::from_micros(900));
        assert!(linger.is_idle());
        linger.ended(start + Duration::from_micros(910));
        assert_eq!((linger.patience.as_micros(), linger.is_idle()), (25, false));
    }
}

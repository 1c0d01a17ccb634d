// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How long a queue's thread goes on looking for requests before it sleeps.
//!
//! A driver that has its answers soon adds the next requests. Where these come while the thread still looks, neither has to wake the
//! other: no exit of the guest, no switch between threads. So the thread lingers for as long as requests were seen to take to come, and
//! not at all where most take longer than is worth a CPU. One that sleeps does not see when a request came, but when it was woken: so
//! it is tried now and then.

use std::time::{Duration, Instant};

use super::gap::{Gap, MOST};
use super::trial::Trial;

/// How long to look, by how long requests took to come.
#[derive(Debug, Default)]
pub(super) struct Linger {
    trial: Trial,
    /// Of requests that come while the thread looks.
    gap: Gap,
    /// For how long the thread looks this time.
    patience: Duration,
    /// Since when there has been nothing to do.
    idle_since: Option<Instant>,
}

impl Linger {
    /// How long to look for requests from `now` on, when there is nothing to do; no time: sleep at once.
    pub(super) fn begin(&mut self, now: Instant) -> Duration {
        // The thread may have been woken meanwhile for something else.
        self.idle_since.get_or_insert(now);
        self.patience = if self.trial.is_on() { self.gap.patience() } else { Duration::ZERO };
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
        if self.patience.is_zero() {
            self.trial.passed(time <= MOST);
        } else if time <= self.patience {
            self.gap.came(time);
            self.trial.gained();
        } else {
            self.gap.missed();
            self.trial.lost(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For how long the thread looks, in µs, each time that a request takes so long to come.
    fn patience(linger: &mut Linger, micros: u64, times: usize) -> Vec<u128> {
        let start = Instant::now();
        let mut turn = || {
            let patience = linger.begin(start);
            linger.ended(start + Duration::from_micros(micros));
            patience.as_micros()
        };
        (0..times).map(|_| turn()).collect()
    }

    #[test]
    fn thread_sleeps_at_once_until_lingering_is_first_tried() {
        assert_eq!(patience(&mut Linger::default(), 40, 64), [0; 64]);
    }

    #[test]
    fn requests_that_come_soon_have_it_look_for_twice_that_time() {
        let mut linger = Linger::default();
        patience(&mut linger, 40, 64);
        assert_eq!(patience(&mut linger, 40, 3), [200, 80, 80]);
        let last = *patience(&mut linger, 79, 200).last().unwrap();
        assert!((150..=158).contains(&last), "it follows them: {last}");
    }

    #[test]
    fn some_that_take_long_keep_it_from_nothing() {
        let mut linger = Linger::default();
        patience(&mut linger, 110, 100);
        for _ in 0..100 {
            patience(&mut linger, 1000, 1);
            assert_eq!(patience(&mut linger, 110, 2), [200; 2]);
        }
    }

    #[test]
    fn slow_requests_make_thread_sleep_and_try_ever_less_often() {
        let mut linger = Linger::default();
        patience(&mut linger, 40, 100);
        let looked = patience(&mut linger, 1000, 20_000).iter().filter(|micros| **micros != 0).count();
        assert!((16..80).contains(&looked), "{looked}");
        // Woken later than they came: only a look tells.
        patience(&mut linger, 150, 300);
        assert_eq!(patience(&mut linger, 110, 100).last(), Some(&200));
    }

    #[test]
    fn idle_time_counts_from_first_idle_despite_other_wakeups() {
        let mut linger = Linger::default();
        patience(&mut linger, 40, 70);
        let start = Instant::now();
        linger.begin(start);
        linger.begin(start + Duration::from_micros(900));
        assert!(linger.is_idle());
        linger.ended(start + Duration::from_micros(910));
        assert_eq!((linger.begin(start).as_micros(), linger.is_idle()), (160, true));
    }
}

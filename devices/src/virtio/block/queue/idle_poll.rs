// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Polling time: the time that a queue's thread polls for requests before it sleeps.
//!
//! If a driver receives its answers quickly, the driver soon adds the next requests. If these requests arrive while the thread still polls,
//! the driver need not notify the device, and the thread need not be woken. This saves an exit of the guest and a switch between threads.
//! Therefore the thread polls for as long as requests usually take to arrive. If most requests take too long, the thread does not poll at
//! all.
//!
//! A thread that sleeps cannot measure when a request arrived, because the thread wakes later. Therefore a thread that has stopped polling
//! sometimes tries polling again.

use std::time::{Duration, Instant};

use super::gap::{Gap, MOST};
use super::trial::Trial;

/// Polling time, adapted to the time that requests take to arrive.
#[derive(Debug, Default)]
pub(super) struct IdlePoll {
    trial: Trial,
    /// Time between requests that arrive while the thread polls.
    gap: Gap,
    /// Polling time that [`Self::begin`] last returned.
    poll_time: Duration,
    /// Time when the thread found no more work. `None` while the thread has work.
    idle_since: Option<Instant>,
}

impl IdlePoll {
    /// Returns the time to poll for requests, from `now` on. Call this function when no request is pending. If the time is zero, the caller
    /// must sleep immediately.
    pub(super) fn begin(&mut self, now: Instant) -> Duration {
        // If there is already a start time, keep it: the thread was woken, but not by new requests.
        self.idle_since.get_or_insert(now);
        self.poll_time = if self.trial.is_on() { self.gap.poll_time() } else { Duration::ZERO };
        self.poll_time
    }

    /// Records that requests have arrived.
    pub(super) fn ended(&mut self, now: Instant) {
        if let Some(since) = self.idle_since.take() {
            self.learn(now.saturating_duration_since(since));
        }
    }

    /// Returns true if the thread waits for requests. When requests then arrive, the caller must read the clock and call [`Self::ended`].
    pub(super) fn is_idle(&self) -> bool {
        self.idle_since.is_some()
    }

    /// Adapts the trial and the polling time. `time` is the time that the thread waited for the last requests.
    fn learn(&mut self, time: Duration) {
        if self.poll_time.is_zero() {
            self.trial.passed(time <= MOST);
        } else if time <= self.poll_time {
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

    /// Simulates `times` requests. Each request arrives `micros` µs after the thread found no more work. Returns the polling time before
    /// each request, in µs.
    fn poll_time(idle_poll: &mut IdlePoll, micros: u64, times: usize) -> Vec<u128> {
        let start = Instant::now();
        let mut turn = || {
            let poll_time = idle_poll.begin(start);
            idle_poll.ended(start + Duration::from_micros(micros));
            poll_time.as_micros()
        };
        (0..times).map(|_| turn()).collect()
    }

    #[test]
    fn thread_does_not_poll_before_the_first_trial() {
        assert_eq!(poll_time(&mut IdlePoll::default(), 40, 64), [0; 64]);
    }

    #[test]
    fn polling_time_is_twice_the_request_interval() {
        let mut idle_poll = IdlePoll::default();
        poll_time(&mut idle_poll, 40, 64);
        assert_eq!(poll_time(&mut idle_poll, 40, 3), [200, 80, 80]);
        let last = *poll_time(&mut idle_poll, 79, 200).last().unwrap();
        assert!((150..=158).contains(&last), "the polling time follows the requests: {last}");
    }

    #[test]
    fn occasional_slow_requests_do_not_stop_polling() {
        let mut idle_poll = IdlePoll::default();
        poll_time(&mut idle_poll, 110, 100);
        for _ in 0..100 {
            poll_time(&mut idle_poll, 1000, 1);
            assert_eq!(poll_time(&mut idle_poll, 110, 2), [200; 2]);
        }
    }

    #[test]
    fn slow_requests_make_thread_sleep_and_try_ever_less_often() {
        let mut idle_poll = IdlePoll::default();
        poll_time(&mut idle_poll, 40, 100);
        let looked = poll_time(&mut idle_poll, 1000, 20_000).iter().filter(|micros| **micros != 0).count();
        assert!((16..80).contains(&looked), "{looked}");
        // A sleeping thread cannot measure the arrival of a request, because the thread wakes only after the arrival. So only a trial can
        // show that requests are fast again.
        poll_time(&mut idle_poll, 150, 300);
        assert_eq!(poll_time(&mut idle_poll, 110, 100).last(), Some(&200));
    }

    #[test]
    fn idle_time_counts_from_first_idle_despite_other_wakeups() {
        let mut idle_poll = IdlePoll::default();
        poll_time(&mut idle_poll, 40, 70);
        let start = Instant::now();
        idle_poll.begin(start);
        idle_poll.begin(start + Duration::from_micros(900));
        assert!(idle_poll.is_idle());
        idle_poll.ended(start + Duration::from_micros(910));
        assert_eq!((idle_poll.begin(start).as_micros(), idle_poll.is_idle()), (160, true));
    }
}

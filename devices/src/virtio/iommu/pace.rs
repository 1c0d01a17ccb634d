// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Measures the time between requests, and the time that the device needs for a request. The ratio of these times decides whether polling
//! pays.

use std::time::{Duration, Instant};

/// Number of notifications per measurement. Only the last of these notifications is measured.
const SAMPLE: u32 = 16;
/// Maximum time to poll for the next request, as a multiple of the duration of one request. [`LEAST`] and [`MOST`] then bound the time.
/// Between these bounds, the thread polls only while requests keep a CPU busy for at least 1/32 of the time.
const POLL_FACTOR: u32 = 32;
/// Bounds of the time to poll for the next request. `LEAST` is long enough to be measured, although the thread reads the clock rarely.
/// `MOST` limits the time that the thread polls without finding a request.
const LEAST: Duration = Duration::from_micros(50);
const MOST: Duration = Duration::from_millis(5);

/// Measurement of every [`SAMPLE`]th notification.
#[derive(Default)]
pub(super) struct Pace {
    count: u32,
    since: Option<Instant>,
    poll_time: Duration,
}

impl Pace {
    /// Returns a measurement for polled requests. `poll_time` is the polling time that was measured before polling began.
    pub(super) fn polled(poll_time: Duration) -> Self {
        Self { count: 0, since: Some(Instant::now()), poll_time }
    }

    /// Calls `serve`, which serves the requests of one notification or of one check of the ring. Returns the result of `serve`, and true if
    /// polling pays: the last [`SAMPLE`] calls were on average less than [`Pace::poll_time`] apart. If the call made no measurement, the
    /// second value is `None`.
    pub(super) fn measure<R>(&mut self, serve: impl FnOnce() -> R) -> (R, Option<bool>) {
        self.count += 1;
        if self.count < SAMPLE {
            return (serve(), None);
        }
        let start = Instant::now();
        let result = serve();
        let pays = self.sample(start, start.elapsed());
        (result, Some(pays))
    }

    /// Records a notification that arrived at `start` and was served in the time `service`. This notification is the [`SAMPLE`]th after the
    /// last recorded notification. Returns true if polling pays.
    fn sample(&mut self, start: Instant, service: Duration) -> bool {
        self.count = 0;
        self.poll_time = (service * POLL_FACTOR).clamp(LEAST, MOST);
        let since = self.since.replace(start);
        since.is_some_and(|since| start.duration_since(since) < self.poll_time * SAMPLE)
    }

    /// Returns the maximum time to poll for the next request.
    pub(super) fn poll_time(&self) -> Duration {
        self.poll_time
    }

    /// Starts a new measurement, because the times that were measured before no longer apply.
    pub(super) fn restart(&mut self) {
        (self.count, self.since) = (0, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SERVICE: Duration = Duration::from_micros(100);

    /// Returns the results of four samples that are `gap` apart.
    fn samples(gap: Duration) -> Vec<bool> {
        let (mut pace, start) = (Pace::default(), Instant::now());
        (0..4).map(|number| pace.sample(start + gap * number, SERVICE)).collect()
    }

    #[test]
    fn polling_pays_below_32_service_times_between_requests() {
        assert_eq!(samples(SERVICE * POLL_FACTOR * SAMPLE - Duration::from_nanos(1)), [false, true, true, true]);
        assert_eq!(samples(SERVICE * POLL_FACTOR * SAMPLE), [false; 4]);
    }

    #[test]
    fn first_sample_after_a_restart_never_pays() {
        let (mut pace, start) = (Pace::default(), Instant::now());
        assert!(!pace.sample(start, SERVICE));
        pace.restart();
        assert!(!pace.sample(start, SERVICE));
        assert!(pace.sample(start, SERVICE));
    }

    #[test]
    fn poll_time_is_bounded_both_ways() {
        let mut pace = Pace::default();
        for (service, poll_time) in
            [(0, LEAST), (1_000, LEAST), (2_000, 32 * Duration::from_micros(2)), (1_000_000, MOST)]
        {
            pace.sample(Instant::now(), Duration::from_nanos(service));
            assert_eq!(pace.poll_time(), poll_time, "{service} ns");
        }
    }

    #[test]
    fn one_notification_in_sixteen_is_measured() {
        let mut pace = Pace::default();
        let pays: Vec<bool> = (0..3 * SAMPLE).map(|_| pace.measure(|| ()).1 == Some(true)).collect();
        let when: Vec<usize> = pays.iter().enumerate().filter(|(_, pays)| **pays).map(|(at, _)| at).collect();
        assert!(when.iter().all(|at| [31, 47].contains(at)), "{when:?}");
    }
}

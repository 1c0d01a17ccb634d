// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Which of two policies a thread goes by, as the time says that requests take by each.

use std::time::Duration;

/// Requests over which times are compared.
const SPAN: u32 = 128;

/// Longest time between two looks that counts: beyond it the driver had nothing to do.
const IDLE: Duration = Duration::from_millis(10);

/// How many times the requests a batch must have served in the same time.
const GAIN: u32 = 2;

/// Spans before the first trial of the other policy, and at most before another.
const SOON: u32 = 2;
const LATE: u32 = 64;

/// See the module.
#[derive(Debug)]
pub(super) struct Pace {
    /// The policy that is kept.
    is_batch_kept: bool,
    /// The other one is tried.
    is_trial: bool,
    /// Of the span that goes on.
    requests: u32,
    time: Duration,
    /// What a span takes by the policy that is kept, on average; none was whole yet where it is zero.
    usual: Duration,
    /// Spans until the next trial, and before the one after it.
    left: u32,
    pause: u32,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            is_batch_kept: false,
            is_trial: false,
            requests: 0,
            time: Duration::ZERO,
            usual: Duration::ZERO,
            left: SOON,
            pause: SOON,
        }
    }
}

impl Pace {
    /// Whether the thread is to be scheduled as a batch.
    pub(super) fn is_batch(&self) -> bool {
        self.is_batch_kept != self.is_trial
    }

    /// So many requests were answered in this time.
    pub(super) fn passed(&mut self, requests: u32, time: Duration) {
        self.requests = self.requests.saturating_add(requests);
        self.time += time.min(IDLE);
        let is_whole = self.requests >= SPAN;
        // Of a span as long as all are.
        let took = self.time * SPAN / self.requests.max(SPAN);
        if !self.is_trial {
            if is_whole {
                self.usual = if self.usual.is_zero() { took } else { (self.usual * 3 + took) / 4 };
                self.left -= 1;
                self.is_trial = self.left == 0;
                self.begin();
            }
            return;
        }
        // A batch is tried or kept only where it takes so much less. A trial ends as soon as it is known how.
        let is_lost = if self.is_batch_kept { took >= self.usual * GAIN } else { took * GAIN > self.usual };
        if is_lost {
            self.pause = LATE.min(self.pause * 2);
        } else if is_whole {
            (self.is_batch_kept, self.usual, self.pause) = (!self.is_batch_kept, took, SOON);
        } else {
            return;
        }
        (self.is_trial, self.left) = (false, self.pause);
        self.begin();
    }

    /// Begins a span.
    fn begin(&mut self) {
        (self.requests, self.time) = (0, Duration::ZERO);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// So many requests, each of which takes this many microseconds, or as a batch that: how many of them were served by a batch.
    fn batched(pace: &mut Pace, requests: u32, other: u64, batch: u64) -> u32 {
        let serve = |_| {
            let is_batch = pace.is_batch();
            pace.passed(1, Duration::from_micros(if is_batch { batch } else { other }));
            u32::from(is_batch)
        };
        (0..requests).map(serve).sum()
    }

    #[test]
    fn batch_that_halves_the_time_is_found_soon_and_kept() {
        let mut pace = Pace::default();
        assert!(batched(&mut pace, 3 * SPAN, 400, 50) >= SPAN - 1);
        let rest = 200 * SPAN;
        assert!(batched(&mut pace, rest, 400, 50) > rest - rest / 50);
    }

    #[test]
    fn batch_that_saves_less_is_tried_rarely_and_for_a_short_time() {
        for batch in [30, 50, 100, 1000] {
            let mut pace = Pace::default();
            let all = 500 * SPAN;
            assert!(batched(&mut pace, all, 50, batch) < all / 40, "{batch}");
        }
    }

    #[test]
    fn batch_that_does_not_pay_any_more_is_left() {
        let mut pace = Pace::default();
        batched(&mut pace, 1000 * SPAN, 400, 50);
        assert!(pace.is_batch_kept && pace.pause == LATE);
        batched(&mut pace, (LATE + 4) * SPAN, 80, 80);
        assert!(!pace.is_batch_kept);
    }

    #[test]
    fn pauses_of_the_driver_count_for_little() {
        let mut pace = Pace::default();
        for _ in 0..SPAN {
            pace.passed(1, Duration::from_secs(100));
        }
        assert_eq!(pace.usual, IDLE * SPAN);
    }

    #[test]
    fn times_are_of_spans_of_one_length() {
        let mut pace = Pace::default();
        pace.passed(4 * SPAN, Duration::from_millis(8));
        assert_eq!(pace.usual, Duration::from_millis(2));
    }
}

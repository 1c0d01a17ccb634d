// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Interrupt coalescing: the thread collects several answers before it notifies the driver.
//!
//! A driver with many requests under way adds further requests without waiting for answers. Each interrupt to such a driver costs an exit
//! of the guest. If the thread sleeps between requests, each notification by the driver costs an exit too. Therefore the thread polls for
//! further requests before it notifies the driver of answers.
//!
//! The thread collects answers up to a target, and then notifies the driver. The collection of answers for one notification is a *turn*. If
//! requests stop arriving before the target is reached, the thread lowers the target to the number of answers of this turn. The new target
//! is at least half of the old target. A driver that waits for its answers adds no requests meanwhile. For such a driver, the target
//! becomes small, so the driver is notified immediately. The thread sometimes tries a larger target. If the additional requests do not
//! arrive, the thread doubles the time until the next trial.

use std::time::Duration;

use super::gap::Gap;

/// Maximum time that an answer waits for other answers.
const LONGEST: Duration = Duration::from_millis(1);

/// Maximum number of answers per notification of the driver.
const ANSWERS: u32 = 16;

/// Number of turns before the next trial of a larger target: `SOON` after a successful trial, and at most `LATE` after failed trials.
const SOON: u32 = 16;
const LATE: u32 = 4096;

/// Maximum number of turns before the next trial, after a turn with more answers than its target.
const AT_A_SIGN: u32 = 64;

/// State of the coalescing: the target, the trials of larger targets, and the time between requests.
#[derive(Debug)]
pub(super) struct Coalescing {
    /// Target: number of answers to collect.
    answers: u32,
    /// True if `answers` was just raised as a trial, and the result of the trial is not known yet.
    is_trial: bool,
    /// Number of turns until the next trial of a larger target.
    left: u32,
    /// Number of turns between two trials. A failed trial doubles this number.
    pause: u32,
    gap: Gap,
}

impl Default for Coalescing {
    fn default() -> Self {
        Self { answers: 1, is_trial: false, left: SOON, pause: SOON, gap: Gap::default() }
    }
}

impl Coalescing {
    /// Returns the time to poll for further requests. Call this function when no request is pending. `answers` is the number of answers
    /// collected so far. If the time is zero, the caller must notify the driver immediately.
    pub(super) fn begin(&mut self, answers: u32) -> Duration {
        if answers >= self.answers {
            if answers > self.answers {
                self.left = self.left.min(AT_A_SIGN);
            }
            self.have_all();
            return Duration::ZERO;
        }
        self.gap.poll_time()
    }

    /// Ends a turn that reached its target.
    fn have_all(&mut self) {
        self.left -= 1;
        if self.is_trial {
            self.pause = SOON;
        } else if self.left != 0 {
            return;
        }
        self.is_trial = self.answers < ANSWERS;
        self.answers = ANSWERS.min(self.answers * 2);
        self.left = self.pause;
    }

    /// Records that the thread polled for `time` until requests arrived.
    pub(super) fn came(&mut self, time: Duration) {
        self.gap.came(time);
    }

    /// Records that no request arrived within the time that [`Self::begin`] returned. `answers` is the number of collected answers.
    pub(super) fn missed(&mut self, answers: u32) {
        if self.is_trial {
            self.pause = LATE.min(self.pause * 2);
        }
        self.gap.missed();
        // At most halve the target, because a single late request does not mean that the driver waits for its answers.
        let answers = answers.max(self.answers / 2).max(1);
        (self.is_trial, self.answers, self.left) = (false, answers, self.pause);
    }

    /// Returns the maximum total time that answers may wait for other answers.
    pub(super) fn longest(&self) -> Duration {
        LONGEST.min(self.gap.0 * self.answers)
    }
}

#[cfg(test)]
mod tests {
    use super::super::gap::MOST;
    use super::*;

    const GAP: Duration = Duration::from_micros(10);

    /// Simulates `turns` turns with a driver that adds a request every [`GAP`], until `depth` requests are under way. Returns the number of
    /// answers in each turn.
    fn answers_per_interrupt(coalescing: &mut Coalescing, depth: u32, turns: u32) -> Vec<u32> {
        answers_per_interrupt_after(coalescing, GAP, depth, turns)
    }

    /// Does the same as [`answers_per_interrupt`], but the driver adds a request every `gap`.
    fn answers_per_interrupt_after(coalescing: &mut Coalescing, gap: Duration, depth: u32, turns: u32) -> Vec<u32> {
        let turn = |_| {
            let mut answers = 1;
            loop {
                let poll_time = coalescing.begin(answers);
                if poll_time.is_zero() {
                    return answers;
                }
                if answers == depth || gap > poll_time {
                    coalescing.missed(answers);
                    return answers;
                }
                coalescing.came(gap);
                answers += 1;
            }
        };
        (0..turns).map(turn).collect()
    }

    #[test]
    fn deep_queue_gets_many_answers_per_interrupt() {
        let mut coalescing = Coalescing::default();
        let answers_per_interrupt = answers_per_interrupt(&mut coalescing, 64, 1000);
        let (first, rest) = answers_per_interrupt.split_at(16);
        assert!(first.iter().all(|answers| *answers == 1), "{answers_per_interrupt:?}");
        assert_eq!(rest[..4], [2, 4, 8, 16]);
        assert!(rest[4..].iter().all(|answers| *answers == 16), "{answers_per_interrupt:?}");
        assert_eq!(coalescing.longest(), GAP * 16);
    }

    #[test]
    fn shallow_queue_is_notified_at_its_depth() {
        for depth in [1, 2, 3, 5] {
            let mut coalescing = Coalescing::default();
            let answers_per_interrupt = answers_per_interrupt(&mut coalescing, depth, 1000);
            assert!(
                answers_per_interrupt[32..].iter().all(|answers| *answers == depth),
                "{depth}: {answers_per_interrupt:?}"
            );
            assert_eq!(coalescing.answers, depth, "the thread expects no more answers");
        }
    }

    #[test]
    fn slower_deep_queue_regains_many_answers_per_interrupt() {
        for gap in [GAP * 3, GAP * 10, MOST] {
            let mut coalescing = Coalescing::default();
            answers_per_interrupt(&mut coalescing, 64, 1000);
            let answers_per_interrupt = answers_per_interrupt_after(&mut coalescing, gap, 64, 1000);
            assert!(
                answers_per_interrupt[500..].iter().all(|answers| *answers == 16),
                "{gap:?}: {answers_per_interrupt:?}"
            );
        }
    }

    #[test]
    fn each_miss_by_the_driver_at_most_halves_the_batch() {
        let mut coalescing = Coalescing::default();
        answers_per_interrupt(&mut coalescing, 64, 1000);
        coalescing.missed(1);
        assert_eq!(answers_per_interrupt(&mut coalescing, 64, 1), [8]);
        let answers_per_interrupt = answers_per_interrupt(&mut coalescing, 1, 8);
        assert!(coalescing.answers == 1, "the driver is notified of each answer now: {answers_per_interrupt:?}");
    }

    #[test]
    fn trials_become_rare_for_a_driver_of_one_request() {
        let mut coalescing = Coalescing::default();
        let (mut turn, mut waits) = (0, Vec::new());
        while turn < 30_000 {
            turn += 1;
            if !coalescing.begin(1).is_zero() {
                coalescing.missed(1);
                waits.push(turn);
            }
        }
        let pauses: Vec<u32> = waits.windows(2).map(|pair| pair[1] - pair[0] - 1).collect();
        assert_eq!(pauses[..4], [2 * SOON, 4 * SOON, 8 * SOON, 16 * SOON]);
        assert!(pauses[8..].iter().all(|pause| *pause == LATE), "{pauses:?}");
    }

    #[test]
    fn more_answers_than_expected_bring_the_next_trial_nearer() {
        let mut coalescing = Coalescing::default();
        answers_per_interrupt(&mut coalescing, 1, 30_000);
        assert!(coalescing.left > AT_A_SIGN);
        assert_eq!((0..).find(|_| !coalescing.begin(2).is_zero() || coalescing.answers > 1), Some(AT_A_SIGN - 1));
    }

    #[test]
    fn wait_is_twice_the_request_interval_and_bounded() {
        let mut coalescing = Coalescing { answers: 8, ..Coalescing::default() };
        assert_eq!((coalescing.begin(1), coalescing.longest()), (MOST, Duration::ZERO));
        coalescing.came(GAP);
        assert_eq!((coalescing.begin(1), coalescing.longest()), (GAP * 2, GAP * 8));
        coalescing.came(Duration::from_millis(10));
        assert_eq!((coalescing.begin(1), coalescing.longest()), (MOST, LONGEST));
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Decides whether the polling thread steps back, because other work runs on its CPU.
//!
//! If the polling thread has no CPU, the driver spins until the thread runs again. This wait can cost more than the exits that polling
//! avoids. But if exits are expensive, polling can be faster although the thread often waits for a CPU. So only a comparison decides: the
//! rate of requests while the thread polls, against the rate while each notification costs an exit.
//!
//! A thread that polls needs its CPU all the time. If it got less in a measurement, a trial with exits begins. After the trial, the better
//! way is used for [`PAUSE`]. Then the other way is measured again, for [`PERIOD`]. So the comparison takes at most 1/100 of the time. A
//! thread with a CPU of its own never steps back.

use std::time::{Duration, Instant};

/// Duration of one measurement. Times without fast requests do not count.
const PERIOD: Duration = Duration::from_millis(50);
/// Minimum time between two measurements of the way that lost.
const PAUSE: Duration = Duration::from_secs(5);
/// A trial begins if the thread had no CPU for at least 1/`MISSING` of a measurement.
const MISSING: u32 = 5;
/// If polling is at least this many times as fast as exits, the thread polls on although it has too little CPU. The rates
/// vary, and polling takes CPU time that other work could use.
const MARGIN: f64 = 1.25;

/// How requests reach the device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Way {
    /// The thread may poll.
    #[default]
    Polling,
    /// Notifications cost exits until the rate of requests is known. `polled` is the rate with polling, in requests per second.
    Trial { polled: f64 },
    /// Notifications cost exits until the given time, because polling was not clearly faster in the trial.
    Exits { until: Instant },
}

/// State of the polling thread: the time, the CPU time that the thread has used, and the position in the available ring of the next request
/// to serve.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment {
    pub(super) now: Instant,
    pub(super) cpu: Duration,
    pub(super) position: u16,
}

/// Comparison of polling with exits. The module documentation describes the method.
#[derive(Debug, Default)]
pub(super) struct Contention {
    way: Way,
    period: Period,
    /// Start of the part of the measurement that is not in `period` yet.
    from: Option<Moment>,
    /// End of the pause after a trial. No trial begins before.
    next_trial: Option<Instant>,
}

/// Measurement of the current way.
#[derive(Clone, Copy, Debug, Default)]
struct Period {
    took: Duration,
    /// CPU time of the polling thread.
    cpu: Duration,
    requests: u32,
}

impl Period {
    /// Returns this measurement, and also what happened between two moments.
    fn and(self, from: Moment, to: Moment) -> Self {
        Self {
            took: self.took + to.now.saturating_duration_since(from.now),
            cpu: self.cpu + to.cpu.saturating_sub(from.cpu),
            requests: self.requests + u32::from(to.position.wrapping_sub(from.position)),
        }
    }

    /// Returns the number of requests per second.
    fn rate(&self) -> f64 {
        f64::from(self.requests) / self.took.as_secs_f64()
    }
}

impl Contention {
    /// Returns a comparison that exits have won. No thread polls until `until`.
    #[cfg(test)]
    pub(super) fn exits(until: Instant) -> Self {
        Self { way: Way::Exits { until }, ..Self::default() }
    }

    /// Records that the thread begins to poll.
    pub(super) fn begin_polling(&mut self, moment: Moment) {
        self.from = Some(moment);
    }

    /// Records that the thread ends polling.
    pub(super) fn end_polling(&mut self, moment: Moment) {
        if let Some(from) = self.from.take()
            && self.way == Way::Polling
        {
            self.period = self.period.and(from, moment);
        }
    }

    /// Records that the thread has served requests until `now`. `position` is the position in the available ring after these requests. `cpu`
    /// returns the CPU time that the thread has used. It is called only at the end of a measurement, because it costs a system call.
    /// Returns true if the thread must stop polling.
    pub(super) fn polled(&mut self, now: Instant, position: u16, cpu: impl FnOnce() -> Duration) -> bool {
        if self.way != Way::Polling {
            return true;
        }
        let Some(from) = self.from else { return false };
        if self.period.took + now.saturating_duration_since(from.now) < PERIOD {
            return false;
        }
        let moment = Moment { now, cpu: cpu(), position };
        let period = std::mem::take(&mut self.period).and(from, moment);
        self.from = Some(moment);
        let missing = period.took.saturating_sub(period.cpu);
        let steps_back = missing >= period.took / MISSING && self.next_trial.is_none_or(|next| now >= next);
        if steps_back {
            (self.way, self.from) = (Way::Trial { polled: period.rate() }, None);
        }
        steps_back
    }

    /// Records that requests of notifications were served until `now`. `position` is the position in the available ring after these
    /// requests. `fast` is true if the requests since the last record arrived so fast that polling would pay. Returns true if the thread
    /// may poll.
    pub(super) fn notified(&mut self, now: Instant, position: u16, fast: bool) -> bool {
        match self.way {
            Way::Polling => true,
            Way::Trial { polled } => {
                let moment = Moment { now, cpu: Duration::ZERO, position };
                if let Some(from) = self.from.replace(moment).filter(|_| fast) {
                    self.period = self.period.and(from, moment);
                }
                if self.period.took < PERIOD {
                    return false;
                }
                let rate = std::mem::take(&mut self.period).rate();
                let (until, polling_wins) = (now + PAUSE, polled >= rate * MARGIN);
                (self.way, self.next_trial) =
                    if polling_wins { (Way::Polling, Some(until)) } else { (Way::Exits { until }, None) };
                polling_wins
            }
            Way::Exits { until } => {
                let over = now >= until;
                if over {
                    self.way = Way::Polling;
                }
                over
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLI: Duration = Duration::from_millis(1);

    /// Contention with clocks that only the test moves.
    struct Test {
        contention: Contention,
        now: Instant,
        cpu: Duration,
        position: u16,
    }

    impl Test {
        fn new() -> Self {
            // Begin before the position wraps.
            let position = u16::MAX - 100;
            Self { contention: Contention::default(), now: Instant::now(), cpu: MILLI * 77, position }
        }

        fn moment(&self) -> Moment {
            Moment { now: self.now, cpu: self.cpu, position: self.position }
        }

        /// Polls for `ms` milliseconds. In each of them, `rate` requests arrive, and the thread runs for `cpu`. Returns the number of
        /// milliseconds after which the thread must stop, or `None`.
        fn poll(&mut self, ms: u32, rate: u16, cpu: Duration) -> Option<u32> {
            self.contention.begin_polling(self.moment());
            let stops = (1..=ms).find(|_| {
                self.now += MILLI;
                self.cpu += cpu;
                self.position = self.position.wrapping_add(rate);
                self.contention.polled(self.now, self.position, || self.cpu)
            });
            self.contention.end_polling(self.moment());
            stops
        }

        /// Sends notifications for `ms` milliseconds, with `rate` requests in each. Returns the number of milliseconds after which the
        /// thread may poll, or `None`.
        fn notify(&mut self, ms: u32, rate: u16) -> Option<u32> {
            (1..=ms).find(|_| {
                self.now += MILLI;
                self.position = self.position.wrapping_add(rate);
                self.contention.notified(self.now, self.position, rate > 0)
            })
        }
    }

    #[test]
    fn thread_with_a_cpu_polls_on() {
        let mut test = Test::new();
        assert_eq!(test.poll(60_000, 20, MILLI), None);
        assert_eq!(test.poll(60_000, 20, MILLI - MILLI / MISSING + Duration::from_nanos(1)), None);
        assert_eq!(test.notify(1, 1), Some(1));
    }

    #[test]
    fn much_faster_polling_goes_on_after_a_trial_and_the_next_trial_waits() {
        let mut test = Test::new();
        assert_eq!(test.poll(60_000, 20, MILLI / 2), Some(50));
        for _ in 0..3 {
            assert_eq!(test.notify(1_000, 16), Some(51));
            assert_eq!(test.poll(60_000, 20, MILLI / 2), Some(5_000));
        }
    }

    #[test]
    fn exits_go_on_unless_polling_is_much_faster_and_polling_is_measured_again_after_the_pause() {
        let mut test = Test::new();
        for _ in 0..3 {
            assert_eq!(test.poll(1_000, 20, MILLI / 2), Some(50));
            assert_eq!(test.notify(60_000, 17), Some(5_051), "trial and pause");
        }
        assert_eq!(test.poll(60_000, 20, MILLI), None, "the thread has a CPU again");
    }

    #[test]
    fn thread_that_is_told_to_stop_does_not_poll_on_during_the_trial() {
        let mut test = Test::new();
        assert_eq!(test.poll(1_000, 20, MILLI / 2), Some(50));
        assert_eq!(test.poll(1_000, 20, MILLI / 2), Some(1));
        assert_eq!(test.notify(1_000, 40), None);
        assert_eq!(test.poll(1_000, 20, MILLI / 2), Some(1));
    }

    #[test]
    fn time_between_bursts_counts_for_neither_way() {
        let mut test = Test::new();
        for _ in 0..4 {
            assert_eq!(test.poll(11, 20, MILLI / 2), None, "bursts of 11 ms, with idle times between");
            test.now += MILLI * 1_000;
        }
        assert_eq!(test.poll(1_000, 20, MILLI / 2), Some(6));
        for _ in 0..4 {
            assert_eq!(test.notify(11, 21), None);
            assert_eq!(test.notify(1_000, 0), None);
        }
        assert_eq!(test.notify(20, 21), None);
        assert!(matches!(test.contention.way, Way::Exits { .. }), "polling was not clearly faster");
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How long the polling thread had no CPU while requests waited for it.
//!
//! A driver does not notify while the thread polls, so a request has no known time. But the thread knows when it last ran:
//! when it had served the requests before, or when it last read the clock. It reads the clock after every few looks at the ring. So the time
//! between two readings is short, unless the host, or a hypervisor below it, ran something else. If the thread finds requests after a long
//! time, they waited for that long at most.
//!
//! The engine reads the clock around each request anyway, so this costs a few comparisons for a batch.

use std::time::{Duration, Instant};

/// A thread that has a CPU is never away for so long, on a host whose clock and `pause` are fast.
const LEAST: Duration = Duration::from_micros(200);

/// See the module. For one time that the thread takes over.
pub(super) struct Stalls {
    /// Last time that the thread surely ran.
    at_work: Instant,
    /// The least time that a chunk of looks took which found nothing; it is long where the host is emulated.
    chunk: Option<Duration>,
}

impl Stalls {
    /// The thread takes over at this moment.
    pub(super) fn new(now: Instant) -> Self {
        Self { at_work: now, chunk: None }
    }

    /// A chunk of looks has found nothing.
    pub(super) fn looked(&mut self, now: Instant) {
        let took = now.saturating_duration_since(self.at_work);
        self.chunk = Some(self.chunk.map_or(took, |chunk| chunk.min(took)));
        self.at_work = now;
    }

    /// Notes that requests were found, and served between these moments. Returns the longest time that they can have waited if the thread
    /// had no CPU.
    pub(super) fn served(&mut self, (began, ended): (Instant, Instant)) -> Option<Duration> {
        let away = began.saturating_duration_since(self.at_work);
        self.at_work = ended;
        (away >= LEAST && away >= self.chunk.unwrap_or_default() * 2).then_some(away)
    }

    /// The same, if another thread had the engine or the queue: then the time says nothing.
    pub(super) fn served_late(&mut self, ended: Instant) {
        self.at_work = ended;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICRO: Duration = Duration::from_micros(1);

    #[test]
    fn requests_found_after_a_time_without_a_cpu_have_waited() {
        let start = Instant::now();
        let at = |micros: u32| start + MICRO * micros;
        let mut stalls = Stalls::new(start);
        assert_eq!(stalls.served((at(150), at(180))), None);
        stalls.looked(at(230));
        assert_eq!(stalls.served((at(250), at(300))), None);
        assert_eq!(stalls.served((at(4300), at(4320))), Some(MICRO * 4000), "since the last was served");
        stalls.looked(at(9000));
        assert_eq!(stalls.served((at(9040), at(9060))), None, "nobody waited while it was away");
        assert_eq!(stalls.served((at(9259), at(9260))), None);
        assert_eq!(stalls.served((at(9460), at(9470))), Some(LEAST));
        assert_eq!(stalls.served((at(9000), at(9480))), None, "a clock that goes back");
    }

    #[test]
    fn looks_that_are_slow_are_no_stalls() {
        let start = Instant::now();
        let at = |micros: u32| start + MICRO * micros;
        let mut stalls = Stalls::new(start);
        stalls.looked(at(1000));
        stalls.looked(at(1500));
        assert_eq!(stalls.served((at(2400), at(2500))), None);
        assert_eq!(stalls.served((at(3500), at(3600))), Some(MICRO * 1000));
    }

    #[test]
    fn wait_for_somebody_else_is_no_stall() {
        let start = Instant::now();
        let mut stalls = Stalls::new(start);
        stalls.served_late(start + MICRO * 5000);
        assert_eq!(stalls.served((start + MICRO * 5010, start + MICRO * 5020)), None);
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Measures how long requests waited because the polling thread had no CPU.
//!
//! A driver sends no notification while the thread polls, so the arrival time of a request is unknown. But the thread knows when it last
//! ran: when it finished the previous requests, or when it last read the clock. The thread reads the clock after a fixed number of checks
//! of the ring. The time between two reads of the clock is short, unless the host, or a hypervisor below the host, ran something else on
//! the CPU. If the thread finds requests after a long time without a CPU, the requests waited at most for this time.
//!
//! The engine reads the clock before and after each request anyway, so this measurement costs only a few comparisons for each batch.

use std::time::{Duration, Instant};

/// Minimum duration of a stall. A thread that has a CPU never needs this long between two reads of the clock, if the host's clock and
/// `pause` instruction are fast.
const LEAST: Duration = Duration::from_micros(200);

/// Measurement of stalls while the thread polls. The module documentation describes the method.
pub(super) struct Stalls {
    /// Last time when the thread is known to have run.
    at_work: Instant,
    /// Shortest time between two reads of the clock while no request arrived. On an emulated host, this time can exceed [`LEAST`]. A stall
    /// is at least twice as long as this time.
    chunk: Option<Duration>,
}

impl Stalls {
    /// Starts the measurement when the thread takes over the request queue.
    pub(super) fn new(now: Instant) -> Self {
        Self { at_work: now, chunk: None }
    }

    /// Records that the thread read the clock, after its checks of the ring found no request.
    pub(super) fn looked(&mut self, now: Instant) {
        let took = now.saturating_duration_since(self.at_work);
        self.chunk = Some(self.chunk.map_or(took, |chunk| chunk.min(took)));
        self.at_work = now;
    }

    /// Records that requests were found, and were served between the times `began` and `ended`. If the thread had no CPU before, returns
    /// the maximum time that the requests waited.
    pub(super) fn served(&mut self, (began, ended): (Instant, Instant)) -> Option<Duration> {
        let away = began.saturating_duration_since(self.at_work);
        self.at_work = ended;
        (away >= LEAST && away >= self.chunk.unwrap_or_default() * 2).then_some(away)
    }

    /// Records that requests were served after a wait for the lock on the engine or the queues. This wait is no stall.
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
        assert_eq!(stalls.served((at(4300), at(4320))), Some(MICRO * 4000), "time since the last request");
        stalls.looked(at(9000));
        assert_eq!(stalls.served((at(9040), at(9060))), None, "no request waited while the thread had no CPU");
        assert_eq!(stalls.served((at(9259), at(9260))), None);
        assert_eq!(stalls.served((at(9460), at(9470))), Some(LEAST));
        assert_eq!(stalls.served((at(9000), at(9480))), None, "the clock went backwards");
    }

    #[test]
    fn slow_checks_of_the_ring_are_no_stalls() {
        let start = Instant::now();
        let at = |micros: u32| start + MICRO * micros;
        let mut stalls = Stalls::new(start);
        stalls.looked(at(1000));
        stalls.looked(at(1500));
        assert_eq!(stalls.served((at(2400), at(2500))), None);
        assert_eq!(stalls.served((at(3500), at(3600))), Some(MICRO * 1000));
    }

    #[test]
    fn wait_for_a_lock_is_no_stall() {
        let start = Instant::now();
        let mut stalls = Stalls::new(start);
        stalls.served_late(start + MICRO * 5000);
        assert_eq!(stalls.served((start + MICRO * 5010, start + MICRO * 5020)), None);
    }
}

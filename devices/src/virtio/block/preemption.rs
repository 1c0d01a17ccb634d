// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Whether a queue's thread, when it is woken, takes the CPU from who runs there.
//!
//! A vCPU that tells of the first of many requests has the thread woken. On a host where the scheduler finds no idle CPU, the thread then
//! preempts the vCPU, serves the one request, and sleeps: two switches between threads, an exit and an interrupt for each. Scheduled as a
//! batch, it does not preempt: the driver adds what it has, and all of it is served at once. But where another CPU becomes idle, such a
//! thread still waits behind the vCPU, for milliseconds.
//!
//! The thread sees neither CPUs nor the driver's depth. It does see how long so many requests take. So it tries the other policy now and
//! then, over as many requests, less and less often while the answer is the same, and is a batch where that halves the time at least.

use std::time::Instant;

use super::pace::Pace;
use crate::scheduling::{Policy, change_policy};

/// The policy of this thread, by how long requests take.
#[derive(Debug, Default)]
pub(super) struct Preemption {
    pace: Pace,
    woken: Option<Instant>,
    /// Somebody has chosen how the thread is scheduled, or the kernel does not change it.
    is_given_up: bool,
}

impl Preemption {
    /// The thread was woken at `now`, and has answered so many requests since it was the last time.
    pub(super) fn woken(&mut self, now: Instant, answers: u32) {
        let Some(since) = self.woken.replace(now) else { return };
        if self.is_given_up {
            return;
        }
        let was_batch = self.pace.is_batch();
        self.pace.passed(answers, now.saturating_duration_since(since));
        let policy = |is_batch| if is_batch { Policy::Batch } else { Policy::Other };
        if self.pace.is_batch() != was_batch {
            self.is_given_up = !change_policy(policy(was_batch), policy(!was_batch));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::scheduling::current_policy;

    /// The thread is woken for each of so many requests, which take this long, or as a batch that.
    fn wake(preemption: &mut Preemption, requests: u32, other: Duration, batch: Duration) {
        let mut now = preemption.woken.unwrap_or_else(Instant::now);
        for _ in 0..requests {
            now += if current_policy() == Some(Policy::Batch) { batch } else { other };
            preemption.woken(now, 1);
        }
    }

    const SHORT: Duration = Duration::from_micros(50);
    const LONG: Duration = Duration::from_micros(400);

    #[test]
    fn thread_is_a_batch_while_that_saves_time() {
        let run = || {
            let mut preemption = Preemption::default();
            wake(&mut preemption, 2000, LONG, SHORT);
            assert_eq!(current_policy(), Some(Policy::Batch));
            wake(&mut preemption, 20_000, SHORT, SHORT);
            assert_eq!(current_policy(), Some(Policy::Other));
        };
        thread::spawn(run).join().unwrap();
    }

    #[test]
    fn policy_that_somebody_chose_stays() {
        let run = || {
            assert!(change_policy(Policy::Other, Policy::Batch));
            let mut preemption = Preemption::default();
            wake(&mut preemption, 20_000, LONG, SHORT);
            assert_eq!((preemption.is_given_up, current_policy()), (true, Some(Policy::Batch)));
        };
        thread::spawn(run).join().unwrap();
    }
}

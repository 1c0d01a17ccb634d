// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Whether a queue's thread, when it is woken, takes the CPU from who runs there.
//!
//! A vCPU that tells of the first of many requests has the thread woken. On a host where the scheduler finds no idle CPU, the thread then
//! preempts the vCPU, serves the one request, and sleeps: two switches between threads, an exit and an interrupt for each. Where it
//! does not preempt, the driver adds what it has, and all of it is served at once. So with many requests at a time the thread is
//! scheduled as a batch. With few, each is waited for, and the thread is to run at once.
//!
//! A thread that preempts never sees many requests. So it is tried now and then what comes if it does not.

use super::trial::Trial;
use crate::scheduling::{Policy, change_policy};

/// So many requests at a time are many.
const MANY: u16 = 4;

/// The policy of this thread, by how many requests there were.
#[derive(Debug, Default)]
pub(super) struct Preemption {
    trial: Trial,
    /// Somebody has chosen how the thread is scheduled, or the kernel does not change it.
    is_given_up: bool,
}

impl Preemption {
    /// The thread was woken, and the driver had added so many requests whose answers it does not have.
    pub(super) fn woken(&mut self, requests: u16) {
        if self.is_given_up {
            return;
        }
        let was_batch = self.trial.is_on();
        match (was_batch, requests >= MANY) {
            (false, _) => self.trial.passed(requests > 1),
            (true, true) => self.trial.gained(),
            (true, false) => self.trial.lost(1),
        }
        let policy = |is_batch| if is_batch { Policy::Batch } else { Policy::Other };
        if self.trial.is_on() != was_batch {
            self.is_given_up = !change_policy(policy(was_batch), policy(!was_batch));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::scheduling::current_policy;

    #[test]
    fn thread_is_a_batch_while_there_are_many_requests_at_a_time() {
        let run = || {
            let mut preemption = Preemption::default();
            let mut after = |requests| {
                (0..100).for_each(|_| preemption.woken(requests));
                current_policy()
            };
            assert_eq!(after(MANY), Some(Policy::Batch));
            assert_eq!(after(MANY - 1), Some(Policy::Other));
        };
        thread::spawn(run).join().unwrap();
    }

    #[test]
    fn policy_that_somebody_chose_stays() {
        let run = || {
            assert!(change_policy(Policy::Other, Policy::Batch));
            let mut preemption = Preemption::default();
            (0..100).for_each(|_| preemption.woken(MANY));
            assert!(preemption.is_given_up);
            (0..100).for_each(|_| preemption.woken(0));
            assert_eq!(current_policy(), Some(Policy::Batch));
        };
        thread::spawn(run).join().unwrap();
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Scheduling policy of a queue's thread. The policy decides if the woken thread preempts the thread that runs on the same CPU.
//!
//! When a driver adds many requests, it notifies the device of the first request. This notification wakes the queue's thread. If the host's
//! scheduler finds no idle CPU, the queue's thread preempts the vCPU thread, serves the single request, and sleeps. This costs two thread
//! switches, an exit and an interrupt per request. Without preemption, the driver first adds all its requests, and the thread then serves
//! all requests together. Therefore the thread uses the batch policy (`SCHED_BATCH`) while many requests arrive at a time. While few
//! requests arrive at a time, the driver waits for the answer to each request, so the thread must run immediately.
//!
//! A thread that preempts the vCPU thread never finds many requests at a time, even if the driver is about to add many requests. Therefore
//! the thread sometimes tries the batch policy.

use super::trial::Trial;
use crate::scheduling::{Policy, change_policy};

/// Minimum number of requests at a time that counts as many requests.
const MANY: u16 = 4;

/// Scheduling policy of this thread, chosen by the number of requests per wakeup.
#[derive(Debug, Default)]
pub(super) struct Preemption {
    trial: Trial,
    /// True if this thread must not change the policy: the user has chosen another policy, or the kernel rejected a change.
    is_given_up: bool,
}

impl Preemption {
    /// Records that the thread was woken. `requests` is the number of requests in the queue that are not answered yet.
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
    fn thread_uses_batch_policy_while_requests_are_many() {
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
    fn policy_chosen_by_the_user_stays() {
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

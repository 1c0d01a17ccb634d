// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The policy by which the host schedules a thread (`sched(7)`).

use std::ffi::c_int;

/// Policies of threads that share the CPUs, each by its niceness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    /// `SCHED_OTHER`: a thread that is woken may take the CPU from the one that runs there.
    Other,
    /// `SCHED_BATCH`: it does not. It has its turn where a CPU is idle, or when the other one's has ended.
    Batch,
}

impl Policy {
    fn number(self) -> c_int {
        match self {
            Self::Other => libc::SCHED_OTHER,
            Self::Batch => libc::SCHED_BATCH,
        }
    }
}

/// The policy of this thread; `None` for another one, as in real time.
pub(crate) fn current_policy() -> Option<Policy> {
    // SAFETY: 0 is the calling thread. No memory is touched.
    let number = unsafe { libc::sched_getscheduler(0) };
    [Policy::Other, Policy::Batch].into_iter().find(|policy| policy.number() == number)
}

/// Changes the policy of this thread, and neither its niceness nor its time slice; `false` if it is not `from`, as when somebody has the
/// program run in real time, or if the kernel does not do it.
pub(crate) fn change_policy(from: Policy, to: Policy) -> bool {
    // Policies for threads without real time have this priority only.
    let priority = libc::sched_param { sched_priority: 0 };
    // SAFETY: 0 is the calling thread; `priority` is read before this returns.
    current_policy() == Some(from) && unsafe { libc::sched_setscheduler(0, to.number(), &raw const priority) } == 0
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn policy_is_changed_from_what_it_is_thought_to_be_only() {
        let run = || {
            assert!(change_policy(Policy::Other, Policy::Batch));
            assert!(!change_policy(Policy::Other, Policy::Batch));
            assert_eq!(current_policy(), Some(Policy::Batch));
            assert!(change_policy(Policy::Batch, Policy::Other));
            assert_eq!(current_policy(), Some(Policy::Other));
        };
        thread::spawn(run).join().unwrap();
    }
}

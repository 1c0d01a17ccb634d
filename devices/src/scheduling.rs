// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Scheduling of the calling thread (`sched(7)`): its policy, and the CPU time that it got.

use std::ffi::c_int;
use std::time::Duration;

/// Policies of threads that share the CPUs by their niceness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    /// `SCHED_OTHER`: a woken thread may preempt the thread that runs on the CPU.
    Other,
    /// `SCHED_BATCH`: a woken thread does not preempt another thread. The woken thread waits for an idle CPU, or for the end of the other
    /// thread's time slice.
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

/// Returns the policy of this thread, or `None` for any other policy, such as a real-time policy.
pub(crate) fn current_policy() -> Option<Policy> {
    // SAFETY: 0 is the calling thread. No memory is touched.
    let number = unsafe { libc::sched_getscheduler(0) };
    [Policy::Other, Policy::Batch].into_iter().find(|policy| policy.number() == number)
}

/// Changes the policy of this thread, but neither its niceness nor its time slice. Returns `false` if the kernel refuses, or if the policy
/// is not `from`. For example, the policy differs if the user runs the program with a real-time policy.
pub(crate) fn change_policy(from: Policy, to: Policy) -> bool {
    // Non-real-time policies allow only this priority.
    let priority = libc::sched_param { sched_priority: 0 };
    // SAFETY: 0 stands for the calling thread. The call reads `priority` before it returns.
    current_policy() == Some(from) && unsafe { libc::sched_setscheduler(0, to.number(), &raw const priority) } == 0
}

/// Returns the CPU time that this thread has used since its start. Each call costs a system call.
///
/// This function makes no other system call. (The function of rustix makes a `prctl` at its first call, which a thread's role may forbid.)
pub(crate) fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for the write of this call. Every kernel has this clock, so the call does not fail.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).expect("the remainder is less than a second"))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn policy_is_changed_only_from_the_expected_one() {
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

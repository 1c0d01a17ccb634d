// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Short time slices for threads that answer clients.
//!
//! vCPUs and a thread that polls use all of a host CPU. A thread that wakes up beside them gets it at once only if its
//! slice is shorter than theirs; else it waits for the end of one of theirs, some milliseconds. It takes no privilege, nor any
//! more of the CPU than before: what is short is the turn, not the share. Before Linux 6.12 it has no effect
//! (`sched_attr::sched_runtime` of `SCHED_OTHER`, `kernel/sched/syscalls.c`).

use std::mem;

/// The shortest slice that the scheduler gives, in ns.
const SHORT: u64 = 100_000;

/// The short slice of the thread that took it.
#[derive(Debug)]
pub struct ShortSlice {
    /// What it was before, in ns; threads that are to have that are started under [`ShortSlice::ordinary`].
    before: u64,
}

impl ShortSlice {
    /// Gives this thread a short slice. `None` if that cannot be, or would change how somebody had it scheduled: in real time,
    /// as a batch or when idle.
    pub fn take() -> Option<Self> {
        let before = set_runtime(SHORT)?;
        Some(Self { before })
    }

    /// Gives this thread its slice of before back, until the answer is dropped: threads that it starts have it from it.
    pub fn ordinary(&self) -> Ordinary {
        set_runtime(self.before);
        Ordinary(())
    }
}

/// Until it is dropped, the thread has its ordinary slice.
#[derive(Debug)]
pub struct Ordinary(());

impl Drop for Ordinary {
    fn drop(&mut self) {
        set_runtime(SHORT);
    }
}

/// Changes the slice of this thread to `runtime` ns, and nothing else of how it is scheduled; what it was. `None` if it has none,
/// or the kernel does not let itself be asked.
fn set_runtime(runtime: u64) -> Option<u64> {
    let mut attr = current()?;
    if attr.sched_policy != libc::SCHED_OTHER.cast_unsigned() {
        return None;
    }
    let before = mem::replace(&mut attr.sched_runtime, runtime);
    // SAFETY: 0 is the calling thread. The kernel reads `attr`, whose size it holds, and changes how this thread is scheduled.
    let status = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0) };
    (status == 0).then_some(before)
}

/// How this thread is scheduled.
fn current() -> Option<libc::sched_attr> {
    let size = u32::try_from(size_of::<libc::sched_attr>()).ok()?;
    // SAFETY: the structure is of numbers only, for each of which 0 is one.
    let mut attr: libc::sched_attr = unsafe { mem::zeroed() };
    // SAFETY: 0 is the calling thread. The kernel writes to `attr`, no more than the size it is given, which is that of `attr`.
    let status = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, size, 0) };
    (status == 0).then_some(attr)
}

#[cfg(test)]
mod tests {
    use std::{ptr, thread};

    use super::*;

    /// Runs `test` in a thread of its own, as it changes how that is scheduled.
    fn in_a_thread(test: impl FnOnce() + Send + 'static) {
        thread::spawn(test).join().unwrap();
    }

    fn runtime() -> u64 {
        current().unwrap().sched_runtime
    }

    fn set(attr: &libc::sched_attr) {
        // SAFETY: as in `set_runtime`.
        assert_eq!(unsafe { libc::syscall(libc::SYS_sched_setattr, 0, ptr::from_ref(attr), 0) }, 0);
    }

    #[test]
    fn short_slice_is_not_for_threads_started_under_the_ordinary_one() {
        in_a_thread(|| {
            let before = runtime();
            let slice = ShortSlice::take().unwrap();
            // A kernel that is older has no slices to set, and says 0 all the while.
            assert_eq!(runtime(), if before == 0 { 0 } else { SHORT });
            {
                let _ordinary = slice.ordinary();
                assert_eq!(thread::spawn(runtime).join().unwrap(), before);
            }
            assert_eq!(runtime(), if before == 0 { 0 } else { SHORT });
        });
    }

    #[test]
    fn thread_scheduled_as_a_batch_stays_so() {
        in_a_thread(|| {
            set(&libc::sched_attr { sched_policy: libc::SCHED_BATCH.cast_unsigned(), ..current().unwrap() });
            let before = runtime();
            assert!(ShortSlice::take().is_none());
            let after = current().unwrap();
            assert_eq!((after.sched_policy, after.sched_runtime), (libc::SCHED_BATCH.cast_unsigned(), before));
        });
    }

    #[test]
    fn thread_keeps_its_niceness() {
        in_a_thread(|| {
            let nicer = (current().unwrap().sched_nice + 1).min(19);
            set(&libc::sched_attr { sched_nice: nicer, ..current().unwrap() });
            drop(ShortSlice::take().unwrap().ordinary());
            assert_eq!(current().unwrap().sched_nice, nicer);
        });
    }
}

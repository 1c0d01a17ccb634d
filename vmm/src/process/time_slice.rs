// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Short time slices for threads that answer clients.
//!
//! vCPUs and a thread that polls use all of a host CPU. A thread that wakes up beside them and had no more than its share gets it
//! at once, as a rule, if its slice is shorter than theirs; else it may wait for the end of one of theirs, some milliseconds. It
//! takes no privilege, nor any more of the CPU than before: what is short is the turn, not the share. Before Linux 6.12 it has no
//! effect (`sched_attr::sched_runtime` of `SCHED_OTHER`, `kernel/sched/syscalls.c`).

use std::{mem, ptr};

/// The shortest slice that the scheduler gives, in ns.
const SHORT: u64 = 100_000;
/// The slice that the scheduler chooses itself, and changes with the number of CPUs.
const ITS_OWN: u64 = 0;

/// A thread's short slice, which it keeps until it ends.
#[derive(Debug)]
pub struct ShortSlice(());

impl ShortSlice {
    /// Gives this thread a short slice. `None` if that cannot be, or would change how somebody had it scheduled: in real time,
    /// as a batch, when idle, or in slices that were chosen (`chrt --sched-runtime`).
    pub fn take() -> Option<Self> {
        (current()?.sched_policy == SCHED_OTHER).then_some(())?;
        let found = set_slice(ITS_OWN)?;
        let own = set_slice(SHORT)?;
        if found != own {
            set_slice(found);
            return None;
        }
        Some(Self(()))
    }

    /// Gives this thread the scheduler's own slice back, until the answer is dropped: threads that it starts inherit its slice.
    pub fn ordinary(&self) -> Ordinary {
        set_slice(ITS_OWN);
        Ordinary(())
    }
}

/// Until it is dropped, the thread has its ordinary slice.
#[derive(Debug)]
pub struct Ordinary(());

impl Drop for Ordinary {
    fn drop(&mut self) {
        set_slice(SHORT);
    }
}

/// `SCHED_OTHER` as the structure has it.
const SCHED_OTHER: u32 = libc::SCHED_OTHER.cast_unsigned();

/// Changes the slice of this thread, in ns, and nothing else of how it is scheduled; what it was. `None` if it has none, as in real
/// time, or the kernel does not let itself be asked.
fn set_slice(slice: u64) -> Option<u64> {
    let mut attr = current()?;
    if ![SCHED_OTHER, libc::SCHED_BATCH.cast_unsigned()].contains(&attr.sched_policy) {
        return None;
    }
    let before = mem::replace(&mut attr.sched_runtime, slice);
    set(&attr).then_some(before)
}

/// Changes how this thread is scheduled; whether the kernel did.
fn set(attr: &libc::sched_attr) -> bool {
    // SAFETY: 0 is the calling thread. The kernel reads `attr`, whose size it holds, and changes how this thread is scheduled.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, ptr::from_ref(attr), 0) == 0 }
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

/// The slice of this thread, in ns; 0 before Linux 6.12, or where the kernel does not say.
#[cfg(test)]
pub(crate) fn of_this_thread() -> u64 {
    current().map_or(0, |attr| attr.sched_runtime)
}

/// Runs `test` in a thread that nobody has had scheduled otherwise; it may change that.
#[cfg(test)]
pub(crate) fn in_ordinary_thread(test: impl FnOnce() + Send + 'static) {
    let attr =
        libc::sched_attr { sched_policy: SCHED_OTHER, sched_priority: 0, sched_runtime: ITS_OWN, ..current().unwrap() };
    let run = move || {
        assert!(set(&attr));
        test();
    };
    std::thread::spawn(run).join().unwrap();
}

/// Whether the slice is a short one, where the kernel has such.
#[cfg(test)]
pub(crate) fn is_short(slice: u64) -> bool {
    slice == 0 || slice == SHORT
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn threads_started_under_an_ordinary_slice_keep_it() {
        in_ordinary_thread(|| {
            let before = of_this_thread();
            let slice = ShortSlice::take().unwrap();
            assert!(is_short(of_this_thread()));
            {
                let _ordinary = slice.ordinary();
                assert_eq!(thread::spawn(of_this_thread).join().unwrap(), before);
            }
            assert!(is_short(of_this_thread()));
        });
    }

    #[test]
    fn thread_scheduled_as_a_batch_stays_so() {
        in_ordinary_thread(|| {
            assert!(set(&libc::sched_attr { sched_policy: libc::SCHED_BATCH.cast_unsigned(), ..current().unwrap() }));
            let before = of_this_thread();
            assert!(ShortSlice::take().is_none());
            let after = current().unwrap();
            assert_eq!((after.sched_policy, after.sched_runtime), (libc::SCHED_BATCH.cast_unsigned(), before));
        });
    }

    #[test]
    fn slice_that_somebody_chose_stays() {
        in_ordinary_thread(|| {
            set_slice(7_000_000);
            let chosen = of_this_thread();
            assert_eq!(ShortSlice::take().is_none(), chosen != 0);
            assert_eq!(of_this_thread(), chosen);
        });
    }

    #[test]
    fn thread_keeps_its_niceness() {
        in_ordinary_thread(|| {
            let nice = current().unwrap().sched_nice;
            let nicer = if nice < 19 { nice + 1 } else { nice };
            assert!(set(&libc::sched_attr { sched_nice: nicer, ..current().unwrap() }));
            drop(ShortSlice::take().unwrap().ordinary());
            assert_eq!(current().unwrap().sched_nice, nicer);
        });
    }
}

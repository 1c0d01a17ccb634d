// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Short time slices for threads that answer clients.
//!
//! vCPUs and polling threads use their host CPUs fully. Such a thread may be running when a thread that answers clients wakes up. The
//! scheduler usually runs the waking thread immediately on two conditions. The waking thread must have used no more than its share of the
//! CPU, and its slice must be shorter than the running thread's slice. Otherwise the waking thread may wait some milliseconds until the
//! running thread's slice ends.
//!
//! A short slice needs no privilege. It does not increase the thread's share of the CPU, because it also makes each turn of the thread
//! shorter. Before Linux 6.12, the slice has no effect (`sched_attr::sched_runtime` of `SCHED_OTHER`, `kernel/sched/syscalls.c`).

use std::{mem, ptr};

/// Shortest slice that the scheduler allows, in ns.
const SHORT: u64 = 100_000;
/// Value that requests the scheduler's default slice, which depends on the number of CPUs.
const ITS_OWN: u64 = 0;

/// Short slice of a thread, which the thread keeps until it ends.
#[derive(Debug)]
pub struct ShortSlice(());

impl ShortSlice {
    /// Gives this thread a short slice. Returns `None` if the kernel rejects the slice, or if the user has chosen real-time, batch or idle
    /// scheduling, or another slice (`chrt --sched-runtime`).
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

    /// Gives this thread the scheduler's default slice until the returned guard is dropped. Threads that this thread starts meanwhile
    /// inherit the default slice.
    pub fn ordinary(&self) -> Ordinary {
        set_slice(ITS_OWN);
        Ordinary(())
    }
}

/// Guard of a thread that has the scheduler's default slice. Dropping the guard gives the thread its short slice again.
#[derive(Debug)]
pub struct Ordinary(());

impl Drop for Ordinary {
    fn drop(&mut self) {
        set_slice(SHORT);
    }
}

/// `SCHED_OTHER` in the type of `sched_attr::sched_policy`.
const SCHED_OTHER: u32 = libc::SCHED_OTHER.cast_unsigned();

/// Sets the slice of this thread, in ns, and keeps all other scheduling attributes. Returns the previous slice. Returns `None` if the
/// thread has no slice, as in real-time scheduling, or if the kernel rejects a call.
fn set_slice(slice: u64) -> Option<u64> {
    let mut attr = current()?;
    if ![SCHED_OTHER, libc::SCHED_BATCH.cast_unsigned()].contains(&attr.sched_policy) {
        return None;
    }
    let before = mem::replace(&mut attr.sched_runtime, slice);
    set(&attr).then_some(before)
}

/// Sets the scheduling of this thread. Returns true on success.
fn set(attr: &libc::sched_attr) -> bool {
    // SAFETY: 0 is the calling thread. The kernel reads `attr`, which contains its own size, and changes the scheduling of this
    // thread.
    unsafe { libc::syscall(libc::SYS_sched_setattr, 0, ptr::from_ref(attr), 0) == 0 }
}

/// Returns the scheduling of this thread.
fn current() -> Option<libc::sched_attr> {
    let size = u32::try_from(size_of::<libc::sched_attr>()).ok()?;
    // SAFETY: the structure has only numbers, for which 0 is a valid value.
    let mut attr: libc::sched_attr = unsafe { mem::zeroed() };
    // SAFETY: 0 is the calling thread. `size` is the size of `attr`, and the kernel writes at most `size` bytes to `attr`.
    let status = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, size, 0) };
    (status == 0).then_some(attr)
}

/// Returns the slice of this thread in ns. Returns 0 before Linux 6.12, or if the kernel does not report the slice.
#[cfg(test)]
pub(crate) fn of_this_thread() -> u64 {
    current().map_or(0, |attr| attr.sched_runtime)
}

/// Runs `test` in a thread with default scheduling, which `test` may change.
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

/// True if the slice is short, or if the kernel reports no slices.
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
    fn slice_that_the_user_chose_stays() {
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

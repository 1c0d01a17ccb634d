// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Threads of devices, with a common implementation of start, pause, resume and end.

use std::io;
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::event_fd;
use crate::handshake::{Handshake, Order};
use crate::sandbox::{self, HostCpus, ThreadRole};
use crate::sync::lock;

/// Condition for a worker's next run. The doorbell and orders always wake the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// The doorbell or an order. No other condition causes a run.
    Doorbell,
    /// [`Task::source`] can be read.
    Source,
    /// This time has passed.
    Time(Duration),
    /// [`Task::source`] can be read, or this time has passed.
    SourceOrTime(Duration),
}

impl Wait {
    /// Returns a condition that is met as soon as `self` or `other` is met.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        let parts = |wait| match wait {
            Self::Doorbell => (false, None),
            Self::Source => (true, None),
            Self::Time(time) => (false, Some(time)),
            Self::SourceOrTime(time) => (true, Some(time)),
        };
        let ((source, time), (other_source, other_time)) = (parts(self), parts(other));
        let first = time.into_iter().chain(other_time).min();
        match (source || other_source, first) {
            (false, None) => Self::Doorbell,
            (true, None) => Self::Source,
            (false, Some(time)) => Self::Time(time),
            (true, Some(time)) => Self::SourceOrTime(time),
        }
    }
}

/// Work of a thread.
pub trait Task: Send + 'static {
    /// Called once at the start of the thread, before its system calls are limited to the calls of its role.
    fn begin(&mut self) {}
    /// Does the pending work. Between two pieces of work, the task must check [`Orders::call`], and return if the result is true. The
    /// next call of `run` does the remaining work.
    fn run(&mut self, orders: &Orders) -> Wait;
    /// Called before the thread pauses or ends. When this function returns, no operation that the task began may be in progress.
    fn settle(&mut self) {}
    /// Returns the file that [`Wait::Source`] waits for.
    fn source(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    /// Called if [`begin`](Self::begin) or [`run`](Self::run) panicked. `run` is not called again.
    fn panicked(&self);
    /// Called after [`panicked`](Self::panicked). When this function returns, no operation that the task began may be in progress.
    fn abandon(&mut self) {}
}

/// Orders to a worker, such as to pause or to stop.
pub struct Orders {
    handshake: Handshake,
    wake: EventFd,
}

impl Orders {
    fn new(order: Order) -> io::Result<Self> {
        Ok(Self { handshake: Handshake::new(order), wake: EventFd::new(EFD_NONBLOCK)? })
    }

    /// Creates orders for a task that runs without a thread. [`call`](Self::call) is never true.
    ///
    /// # Errors
    /// The process cannot open more descriptors.
    pub fn none() -> io::Result<Self> {
        Self::new(Order::Run)
    }

    /// True if the worker must pause or stop.
    pub fn call(&self) -> bool {
        !self.handshake.runs()
    }

    fn give(&self, order: Order) {
        self.handshake.give(order);
        // The write fails only if the counter is at its maximum. Even then, the event wakes the worker.
        let _ = self.wake.write(1);
    }

    /// Waits while the order is [`Order::Pause`]. Returns `false` for [`Order::Stop`]. Calls `settle` before it waits or returns `false`.
    fn may_run(&self, settle: impl FnOnce()) -> bool {
        self.handshake.wait_to_run(settle)
    }
}

/// Thread with its task. Dropping the worker ends the thread.
pub struct Worker<T: Task> {
    orders: Arc<Orders>,
    /// The thread holds this lock while it runs the task or waits for work.
    task: Arc<Mutex<T>>,
    role: &'static str,
    thread: Option<JoinHandle<()>>,
}

impl<T: Task> Worker<T> {
    /// Starts a thread. If `paused` is true, the thread is paused. Otherwise the thread runs `task` once. After each write to `doorbell`,
    /// the thread runs `task` again.
    ///
    /// # Errors
    /// The host cannot create a thread or a descriptor.
    pub fn spawn(name: String, role: ThreadRole, doorbell: EventFd, paused: bool, task: T) -> io::Result<Self> {
        Self::spawn_on(None, name, role, doorbell, paused, task)
    }

    /// Like [`spawn`](Self::spawn), but pins the thread to `cpus`.
    ///
    /// # Errors
    /// The host cannot create a thread or a descriptor, or the thread cannot use a CPU of `cpus`.
    pub fn spawn_on(
        cpus: Option<HostCpus>,
        name: String,
        role: ThreadRole,
        doorbell: EventFd,
        paused: bool,
        task: T,
    ) -> io::Result<Self> {
        let orders = Arc::new(Orders::new(if paused { Order::Pause } else { Order::Run })?);
        let task = Arc::new(Mutex::new(task));
        let (of_thread, task_of_thread) = (orders.clone(), task.clone());
        let prepare = move || {
            let begun = catch_unwind(AssertUnwindSafe(|| lock(&task_of_thread).begin()));
            move || {
                let work = AssertUnwindSafe(|| work(&of_thread, &task_of_thread, &doorbell));
                if begun.and_then(|()| catch_unwind(work)).is_err() {
                    lock(&task_of_thread).panicked();
                    // Abandon the task on this thread, because the system call filter of the thread that drops the task may forbid the
                    // necessary calls.
                    let _ = catch_unwind(AssertUnwindSafe(|| lock(&task_of_thread).abandon()));
                }
                of_thread.handshake.end();
            }
        };
        let thread = sandbox::start_prepared(role, name, cpus, prepare)?;
        Ok(Self { orders, task, role: role.name, thread: Some(thread) })
    }

    /// Orders the thread to pause, and waits until it pauses or has ended.
    pub fn pause(&self) {
        self.orders.give(Order::Pause);
        self.orders.handshake.wait_parked();
    }

    /// Lets the thread continue. The thread runs its task once, even if no event was written.
    pub fn resume(&self) {
        self.orders.give(Order::Run);
    }

    /// Calls `look` with the task. Pause the worker first, because a worker that is not paused may keep the task locked for any time.
    pub fn with_task<R>(&self, look: impl FnOnce(&mut T) -> R) -> R {
        look(&mut lock(&self.task))
    }

    /// Ends the thread and calls `look` with its task.
    pub fn stop<R>(mut self, look: impl FnOnce(&mut T) -> R) -> R {
        self.end();
        self.with_task(look)
    }

    fn end(&mut self) {
        self.orders.give(Order::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("a device thread of role '{}' panicked", self.role);
        }
    }
}

impl<T: Task> Drop for Worker<T> {
    fn drop(&mut self) {
        self.end();
    }
}

/// Events of a worker that may have been written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rung {
    wake: bool,
    doorbell: bool,
}

/// Value for events whose state is unknown. This value assumes that both events were written.
const UNKNOWN: Rung = Rung { wake: true, doorbell: true };

fn work<T: Task>(orders: &Orders, task: &Mutex<T>, doorbell: &EventFd) {
    let mut rung = UNKNOWN;
    while orders.may_run(|| lock(task).settle()) {
        // Read the written events, so that only a new write wakes the thread again. Other events are not read, because each read costs a
        // system call. With `UNKNOWN`, an event may be read that was not written. Such a read fails, so ignore errors.
        let _ = rung.wake.then(|| orders.wake.read());
        let _ = rung.doorbell.then(|| doorbell.read());
        let mut task = lock(task);
        let wait = task.run(orders);
        rung = if orders.call() { UNKNOWN } else { sleep(orders, doorbell, &*task, wait) };
    }
}

/// Waits for the condition `wait`, the doorbell, or an order.
fn sleep(orders: &Orders, doorbell: &EventFd, task: &impl Task, wait: Wait) -> Rung {
    let (wake, doorbell) = (event_fd::borrow(&orders.wake), event_fd::borrow(doorbell));
    let source = matches!(wait, Wait::Source | Wait::SourceOrTime(_)).then(|| task.source()).flatten();
    let watched = [wake, doorbell, source.unwrap_or(wake)];
    let mut files = watched.each_ref().map(|file| PollFd::new(file, PollFlags::IN));
    let count = if source.is_some() { 3 } else { 2 };
    let time = match wait {
        Wait::Time(time) | Wait::SourceOrTime(time) => Timespec::try_from(time).ok(),
        Wait::Doorbell | Wait::Source => None,
    };
    match poll(&mut files[..count], time.as_ref()) {
        Ok(_) => Rung { wake: !files[0].revents().is_empty(), doorbell: !files[1].revents().is_empty() },
        Err(error) => {
            if error != rustix::io::Errno::INTR {
                log::error!("a device thread cannot wait for its work: {error}");
            }
            UNKNOWN
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use rustix::thread::{CpuSet, sched_getaffinity};

    use super::*;

    /// Task that reports the number of each run, and panics in run `panics_at`.
    struct Counter {
        runs: u32,
        /// Thread that called `begin`.
        begun: Option<std::thread::ThreadId>,
        abandoned: bool,
        /// True if `settle` was called since the last run.
        settled: bool,
        panics_at: Option<u32>,
        wait: Wait,
        sender: Sender<u32>,
    }

    impl Task for Counter {
        fn begin(&mut self) {
            assert!(self.begun.replace(std::thread::current().id()).is_none() && self.runs == 0);
        }
        fn run(&mut self, _: &Orders) -> Wait {
            assert_eq!(self.begun, Some(std::thread::current().id()));
            self.runs += 1;
            self.settled = false;
            assert_ne!(Some(self.runs), self.panics_at, "panic of the test");
            self.sender.send(self.runs).unwrap();
            self.wait
        }
        fn settle(&mut self) {
            self.settled = true;
        }
        fn panicked(&self) {
            self.sender.send(u32::MAX).unwrap();
        }
        fn abandon(&mut self) {
            self.abandoned = true;
        }
    }

    const ROLE: ThreadRole = ThreadRole { name: "test", calls: &[] };

    fn start(paused: bool, panics_at: Option<u32>, wait: Wait) -> (Worker<Counter>, EventFd, Receiver<u32>) {
        let (sender, receiver) = channel();
        let doorbell = EventFd::new(EFD_NONBLOCK).unwrap();
        let ours = doorbell.try_clone().unwrap();
        let task = Counter { runs: 0, begun: None, abandoned: false, settled: false, panics_at, wait, sender };
        (Worker::spawn("test".into(), ROLE, doorbell, paused, task).unwrap(), ours, receiver)
    }

    #[test]
    fn worker_runs_once_at_start_and_once_per_doorbell() {
        let (worker, doorbell, receiver) = start(false, None, Wait::Doorbell);
        assert_eq!(receiver.recv(), Ok(1));
        doorbell.write(1).unwrap();
        assert_eq!(receiver.recv(), Ok(2));
        assert_eq!(worker.stop(|task| task.runs), 2);
    }

    #[test]
    fn paused_worker_does_nothing_until_it_is_resumed() {
        let (worker, doorbell, receiver) = start(true, None, Wait::Doorbell);
        worker.pause();
        doorbell.write(1).unwrap();
        assert_eq!(worker.with_task(|task| task.runs), 0);
        worker.resume();
        assert_eq!(receiver.recv(), Ok(1));
        worker.pause();
        let runs = worker.with_task(|task| task.runs);
        doorbell.write(1).unwrap();
        assert_eq!(worker.with_task(|task| task.runs), runs);
        assert_eq!(worker.stop(|task| task.runs), runs);
    }

    #[test]
    fn worker_settles_before_it_pauses_and_before_it_ends() {
        let (worker, doorbell, receiver) = start(false, None, Wait::Doorbell);
        for _ in 0..100 {
            doorbell.write(1).unwrap();
            receiver.recv().unwrap();
            worker.pause();
            assert!(worker.with_task(|task| task.settled));
            worker.resume();
        }
        doorbell.write(1).unwrap();
        assert!(worker.stop(|task| task.settled));
    }

    #[test]
    fn worker_that_waits_for_time_runs_again_by_itself() {
        let time = Duration::from_millis(1);
        for wait in [Wait::Time(time), Wait::SourceOrTime(time)] {
            let (worker, _doorbell, receiver) = start(false, None, wait);
            assert!((1..=3).all(|run| receiver.recv() == Ok(run)));
            drop(worker);
        }
    }

    #[test]
    fn combined_waits_end_with_the_first_condition() {
        let [short, long] = [1, 2].map(Duration::from_secs);
        for (one, other, both) in [
            (Wait::Doorbell, Wait::Doorbell, Wait::Doorbell),
            (Wait::Doorbell, Wait::Source, Wait::Source),
            (Wait::Time(long), Wait::Doorbell, Wait::Time(long)),
            (Wait::Time(long), Wait::Time(short), Wait::Time(short)),
            (Wait::Source, Wait::Time(short), Wait::SourceOrTime(short)),
            (Wait::SourceOrTime(short), Wait::Time(long), Wait::SourceOrTime(short)),
        ] {
            assert_eq!((one.or(other), other.or(one)), (both, both));
        }
    }

    /// Task that waits for its own event.
    struct Listener(EventFd);

    impl Task for Listener {
        fn run(&mut self, _: &Orders) -> Wait {
            Wait::Source
        }
        fn source(&self) -> Option<BorrowedFd<'_>> {
            Some(event_fd::borrow(&self.0))
        }
        fn panicked(&self) {}
    }

    #[test]
    fn thread_that_was_woken_knows_which_events_to_read() {
        let new = || EventFd::new(EFD_NONBLOCK).unwrap();
        let (orders, doorbell, task) = (Orders::none().unwrap(), new(), Listener(new()));
        task.0.write(1).unwrap();
        let woken = || sleep(&orders, &doorbell, &task, Wait::Source);
        assert_eq!(woken(), Rung { wake: false, doorbell: false });
        doorbell.write(1).unwrap();
        assert_eq!(woken(), Rung { wake: false, doorbell: true });
        orders.give(Order::Pause);
        assert_eq!(woken(), Rung { wake: true, doorbell: true });
        // This task waits for a source, but has no source file.
        let (worker, _doorbell, receiver) = start(false, None, Wait::Source);
        assert_eq!(receiver.recv(), Ok(1));
        drop(worker);
    }

    /// Task that reports the CPUs on which its thread may run.
    struct Place(Sender<CpuSet>);

    impl Task for Place {
        fn run(&mut self, _: &Orders) -> Wait {
            self.0.send(sched_getaffinity(None).unwrap()).unwrap();
            Wait::Doorbell
        }
        fn panicked(&self) {}
    }

    #[test]
    fn worker_runs_on_its_assigned_cpus_or_on_any() {
        let all = sched_getaffinity(None).unwrap();
        let last = (0..CpuSet::MAX_CPU).rfind(|cpu| all.is_set(*cpu)).unwrap();
        let only = HostCpus::new([u32::try_from(last).unwrap()]).unwrap();
        for cpus in [None, Some(only)] {
            let (sender, receiver) = channel();
            let doorbell = EventFd::new(EFD_NONBLOCK).unwrap();
            let worker = Worker::spawn_on(cpus, "test".into(), ROLE, doorbell, false, Place(sender)).unwrap();
            let place = receiver.recv().unwrap();
            assert_eq!((place.is_set(last), place.count()), (true, if cpus.is_some() { 1 } else { all.count() }));
            drop(worker);
        }
        let beyond = HostCpus::new([u32::try_from(CpuSet::MAX_CPU - 1).unwrap()]).unwrap();
        let (sender, receiver) = channel();
        let doorbell = EventFd::new(EFD_NONBLOCK).unwrap();
        let refused =
            Worker::spawn_on(Some(beyond), "test".into(), ROLE, doorbell, false, Place(sender)).err().unwrap();
        assert!(refused.to_string().starts_with("cannot use CPU 1023 of the host: "), "{refused}");
        receiver.recv().unwrap_err();
    }

    #[test]
    fn panicked_worker_reports_it_and_blocks_no_other_thread() {
        let (worker, _doorbell, receiver) = start(false, Some(1), Wait::Doorbell);
        assert_eq!(receiver.recv(), Ok(u32::MAX));
        worker.pause();
        worker.resume();
        assert_eq!(worker.stop(|task| (task.runs, task.abandoned)), (1, true));
    }
}

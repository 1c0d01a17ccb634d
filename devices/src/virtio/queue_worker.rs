// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Threads that serve the queues of a device: their start and end, pause and resume, and their doorbells.

use std::io;
use std::sync::Mutex;

use virtio_queue::Queue;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::device::{DeviceQueues, Driver, QueueState};
use crate::sandbox::{HostCpus, ThreadRole};
use crate::sync::lock;
use crate::worker::{Task, Worker};

/// Work of a thread that serves queues. Its queues are added and removed while the thread is paused.
///
/// A task is made with its first queue. The defaults are for a task that serves no other queue.
pub(super) trait QueueTask: Task {
    /// Adds a queue.
    fn put(&mut self, _: u16, _: Queue) {}
    /// Removes a queue. Returns how far it was served, or `None` if there is no such queue.
    fn take(&mut self, index: u16) -> Option<QueueState> {
        self.state(index)
    }
    /// Returns how far a queue was served, or `None` if there is no such queue.
    fn state(&self, index: u16) -> Option<QueueState>;
    /// True if there is no queue left.
    fn is_idle(&self) -> bool {
        true
    }
}

/// How a thread is started.
pub(super) struct Thread {
    pub(super) name: String,
    pub(super) role: ThreadRole,
    /// CPUs of the host that it runs on. `None`: any.
    pub(super) cpus: Option<HostCpus>,
}

/// Makes the work of a thread, with its first queue and that queue's doorbell.
type Make<T> = dyn Fn(Driver, u16, Queue, &EventFd) -> io::Result<(Thread, T)> + Send + Sync;

/// True if a queue of this driver has a thread of its own. It keeps the doorbell.
type IsApart = dyn Fn(u16, &Driver) -> bool + Send + Sync;

/// Changes with the driver.
struct Active<T: Task> {
    driver: Option<Driver>,
    /// With the number of each thread. They are few, and a map for each kind of task is much code.
    workers: Vec<(usize, Worker<T>)>,
    paused: bool,
}

impl<T: Task> Active<T> {
    fn workers(&self) -> impl Iterator<Item = &Worker<T>> {
        self.workers.iter().map(|(_, worker)| worker)
    }

    fn worker(&self, number: usize) -> Option<&Worker<T>> {
        self.workers.iter().find(|(other, _)| *other == number).map(|(_, worker)| worker)
    }
}

/// Threads that serve the queues of a device. Each starts with its first queue and ends with its last one.
pub(super) struct QueueWorker<T: Task> {
    /// Number of queues.
    queues: usize,
    /// Number of queues that share a thread and a doorbell: the first ones, the next ones, and so on.
    shared_by: usize,
    doorbells: Vec<EventFd>,
    is_apart: Box<IsApart>,
    make: Box<Make<T>>,
    active: Mutex<Active<T>>,
}

impl<T: QueueTask> QueueWorker<T> {
    /// Serves `queues` queues by one thread called `thread`.
    ///
    /// # Errors
    /// The process can have no more descriptors.
    pub(super) fn new(
        thread: String,
        role: ThreadRole,
        queues: usize,
        make: impl Fn(Driver, u16, Queue) -> io::Result<T> + Send + Sync + 'static,
    ) -> io::Result<Self> {
        Self::several(
            queues,
            queues,
            |_, _| false,
            move |driver, index, queue, _| {
                Ok((Thread { name: thread.clone(), role, cpus: None }, make(driver, index, queue)?))
            },
        )
    }

    /// Serves `queues` queues by a thread for each `shared_by` of them. A queue that `is_apart` has a thread of its own.
    ///
    /// # Errors
    /// The process can have no more descriptors.
    pub(super) fn several(
        queues: usize,
        shared_by: usize,
        is_apart: impl Fn(u16, &Driver) -> bool + Send + Sync + 'static,
        make: impl Fn(Driver, u16, Queue, &EventFd) -> io::Result<(Thread, T)> + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let doorbells = 0..queues.div_ceil(shared_by);
        let doorbells = doorbells.map(|_| EventFd::new(EFD_NONBLOCK)).collect::<io::Result<_>>()?;
        let active = Mutex::new(Active { driver: None, workers: Vec::new(), paused: false });
        Ok(Self { queues, shared_by, doorbells, is_apart: Box::new(is_apart), make: Box::new(make), active })
    }

    /// Number of the thread that serves a queue.
    fn thread(&self, index: u16, driver: Option<&Driver>) -> usize {
        let is_apart = driver.is_some_and(|driver| (self.is_apart)(index, driver));
        // A queue that is apart has a number behind those of all others.
        if is_apart { self.queues + usize::from(index) } else { usize::from(index) / self.shared_by }
    }

    /// The driver, if one is ready.
    pub(super) fn driver(&self) -> Option<Driver> {
        lock(&self.active).driver.clone()
    }

    /// Rings all doorbells.
    pub(super) fn ring(&self) {
        // It fails where it was rung 2^64 times already.
        self.doorbells.iter().for_each(|doorbell| _ = doorbell.write(1));
    }

    /// Pauses a device that is restored. Its queues are started afterwards.
    pub(super) fn restore_paused(&self) {
        lock(&self.active).paused = true;
    }

    /// Calls `change` while no thread runs and no request is in flight.
    pub(super) fn while_paused<R>(&self, change: impl FnOnce() -> R) -> R {
        let active = lock(&self.active);
        let running = || active.workers().filter(|_| !active.paused);
        running().for_each(Worker::pause);
        let result = change();
        running().for_each(Worker::resume);
        result
    }
}

impl<T: QueueTask> DeviceQueues for QueueWorker<T> {
    fn activate(&self, driver: Driver) {
        lock(&self.active).driver = Some(driver);
    }

    fn start(&self, index: u16, queue: Queue) -> io::Result<()> {
        let mut active = lock(&self.active);
        let (Some(driver), Some(doorbell)) = (active.driver.clone(), self.doorbell(index)) else { return Ok(()) };
        let (paused, number) = (active.paused, self.thread(index, Some(&driver)));
        if let Some(worker) = active.worker(number) {
            worker.pause();
            worker.with_task(|task| task.put(index, queue));
            if !paused {
                worker.resume();
            }
            return Ok(());
        }
        let (Thread { name, role, cpus }, task) = (self.make)(driver, index, queue, doorbell)?;
        let worker = Worker::spawn_on(cpus, name, role, doorbell.try_clone()?, paused, task)?;
        active.workers.push((number, worker));
        Ok(())
    }

    fn stop(&self, index: u16) -> Option<QueueState> {
        self.doorbell(index)?;
        let mut active = lock(&self.active);
        let (paused, number) = (active.paused, self.thread(index, active.driver.as_ref()));
        let worker = active.worker(number)?;
        worker.pause();
        let (state, is_idle) = worker.with_task(|task| (task.take(index), task.is_idle()));
        if is_idle {
            active.workers.retain(|(other, _)| *other != number);
        } else if !paused {
            worker.resume();
        }
        state
    }

    fn state(&self, index: u16) -> Option<QueueState> {
        let active = lock(&self.active);
        active.worker(self.thread(index, active.driver.as_ref()))?.with_task(|task| task.state(index))
    }

    fn doorbell(&self, index: u16) -> Option<&EventFd> {
        let index = usize::from(index);
        self.doorbells.get(index / self.shared_by).filter(|_| index < self.queues)
    }

    fn reset(&self) {
        lock(&self.active).driver = None;
    }

    fn pause(&self) {
        let mut active = lock(&self.active);
        active.paused = true;
        active.workers().for_each(Worker::pause);
    }

    fn resume(&self) {
        let mut active = lock(&self.active);
        active.paused = false;
        active.workers().for_each(Worker::resume);
    }
}

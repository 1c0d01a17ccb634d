// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Threads that serve the queues of a device, and the doorbells of these queues. [`QueueWorker`] starts, stops, pauses and resumes the
//! threads.

use std::io;
use std::sync::Mutex;

use virtio_queue::Queue;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::device::{DeviceQueues, Driver, QueueState};
use crate::sandbox::{HostCpus, ThreadRole};
use crate::sync::lock;
use crate::worker::{Task, Worker};

/// Work of a thread that serves queues. The thread is paused while a queue is added or removed.
///
/// A task is created with its first queue. The default methods suit a task that serves only its first queue.
pub(super) trait QueueTask: Task {
    /// Adds a queue.
    fn put(&mut self, _: u16, _: Queue) {}
    /// Removes a queue. Returns the queue's position, or `None` if the task does not have the queue.
    fn take(&mut self, index: u16) -> Option<QueueState> {
        self.state(index)
    }
    /// Returns the position of a queue, or `None` if the task does not have the queue.
    fn state(&self, index: u16) -> Option<QueueState>;
    /// True if no queue is left.
    fn is_idle(&self) -> bool {
        true
    }
}

/// Parameters of a new thread.
pub(super) struct Thread {
    pub(super) name: String,
    pub(super) role: ThreadRole,
    /// Host CPUs that the thread may run on. `None` means any host CPU.
    pub(super) cpus: Option<HostCpus>,
}

/// Function that creates the task of a thread from the thread's first queue and the queue's doorbell.
type Make<T> = dyn Fn(Driver, u16, Queue, &EventFd) -> io::Result<(Thread, T)> + Send + Sync;

/// Function that returns true if a queue has its own thread while this driver uses the device. The queue still shares its doorbell with
/// other queues.
type IsApart = dyn Fn(u16, &Driver) -> bool + Send + Sync;

/// State that changes with the driver.
struct Active<T: Task> {
    driver: Option<Driver>,
    /// Threads, each with the number that `QueueWorker::thread` returns. A list is fast enough for a few threads. A map would add much
    /// machine code for each task type.
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

/// Threads that serve the queues of a device. Each thread starts when its first queue is started, and ends when its last queue is stopped.
pub(super) struct QueueWorker<T: Task> {
    /// Number of queues.
    queues: usize,
    /// Number of consecutive queues that share a thread and a doorbell.
    shared_by: usize,
    doorbells: Vec<EventFd>,
    is_apart: Box<IsApart>,
    make: Box<Make<T>>,
    active: Mutex<Active<T>>,
}

impl<T: QueueTask> QueueWorker<T> {
    /// Returns a worker that serves `queues` queues with one thread called `thread`.
    ///
    /// # Errors
    /// The process has no free file descriptor.
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

    /// Returns a worker that serves `queues` queues, with one thread for each `shared_by` consecutive queues. If `is_apart` returns true
    /// for a queue, the queue has its own thread.
    ///
    /// # Errors
    /// The process has no free file descriptor.
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

    /// Returns the number of the thread that serves a queue.
    fn thread(&self, index: u16, driver: Option<&Driver>) -> usize {
        let is_apart = driver.is_some_and(|driver| (self.is_apart)(index, driver));
        // The numbers of threads that serve a single queue are above the numbers of all shared threads.
        if is_apart { self.queues + usize::from(index) } else { usize::from(index) / self.shared_by }
    }

    /// Returns the driver, if one is ready.
    pub(super) fn driver(&self) -> Option<Driver> {
        lock(&self.active).driver.clone()
    }

    /// Rings all doorbells.
    pub(super) fn ring(&self) {
        // The write fails only if the eventfd's counter would overflow. A notification is then already pending.
        self.doorbells.iter().for_each(|doorbell| _ = doorbell.write(1));
    }

    /// Marks a restored device as paused, before its queues are started.
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

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! One thread that serves all queues of a device: its start and end, pause and resume, and its doorbell.

use std::io;
use std::sync::Mutex;

use virtio_queue::Queue;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::device::{DeviceQueues, Driver, QueueState};
use crate::sandbox::ThreadRole;
use crate::sync::lock;
use crate::worker::{Task, Worker};

/// Work of a thread that serves queues. Its queues are added and removed while the thread is paused.
pub(super) trait QueueTask: Task {
    /// Adds a queue.
    fn put(&mut self, index: u16, queue: Queue);
    /// Removes a queue. Returns how far it was served, or `None` if there is no such queue.
    fn take(&mut self, index: u16) -> Option<QueueState>;
    /// Returns how far a queue was served, or `None` if there is no such queue.
    fn state(&self, index: u16) -> Option<QueueState>;
    /// True if there is no queue left.
    fn is_idle(&self) -> bool;
}

/// Makes the work of the thread, with its first queue.
type Make<T> = Box<dyn Fn(Driver, u16, Queue) -> io::Result<T> + Send + Sync>;

/// Changes with the driver.
struct Active<T: Task> {
    driver: Option<Driver>,
    worker: Option<Worker<T>>,
    paused: bool,
}

/// One thread that serves all queues of a device. It starts with the first queue and ends with the last one.
pub(super) struct QueueWorker<T: Task> {
    /// Name of the thread.
    thread: String,
    role: ThreadRole,
    /// Number of queues.
    queues: usize,
    /// Doorbell of all queues.
    doorbell: EventFd,
    make: Make<T>,
    active: Mutex<Active<T>>,
}

impl<T: QueueTask> QueueWorker<T> {
    /// Serves `queues` queues by a thread called `thread`.
    ///
    /// # Errors
    /// The process can have no more descriptors.
    pub(super) fn new(
        thread: String,
        role: ThreadRole,
        queues: usize,
        make: impl Fn(Driver, u16, Queue) -> io::Result<T> + Send + Sync + 'static,
    ) -> io::Result<Self> {
        let active = Mutex::new(Active { driver: None, worker: None, paused: false });
        Ok(Self { thread, role, queues, doorbell: EventFd::new(EFD_NONBLOCK)?, make: Box::new(make), active })
    }

    /// The driver, if one is ready.
    pub(super) fn driver(&self) -> Option<Driver> {
        lock(&self.active).driver.clone()
    }

    /// Rings the doorbell.
    pub(super) fn ring(&self) {
        // It fails where it was rung 2^64 times already.
        let _ = self.doorbell.write(1);
    }

    /// Pauses a device that is restored. Its queues are started afterwards.
    pub(super) fn restore_paused(&self) {
        lock(&self.active).paused = true;
    }
}

impl<T: QueueTask> DeviceQueues for QueueWorker<T> {
    fn activate(&self, driver: Driver) {
        lock(&self.active).driver = Some(driver);
    }

    fn start(&self, index: u16, queue: Queue) -> io::Result<()> {
        let mut active = lock(&self.active);
        let Some(driver) = active.driver.clone().filter(|_| usize::from(index) < self.queues) else { return Ok(()) };
        let paused = active.paused;
        if let Some(worker) = &active.worker {
            worker.pause();
            worker.with_task(|task| task.put(index, queue));
            if !paused {
                worker.resume();
            }
            return Ok(());
        }
        let task = (self.make)(driver, index, queue)?;
        let doorbell = self.doorbell.try_clone()?;
        active.worker = Some(Worker::spawn(self.thread.clone(), self.role, doorbell, paused, task)?);
        Ok(())
    }

    fn stop(&self, index: u16) -> Option<QueueState> {
        self.doorbell(index)?;
        let mut active = lock(&self.active);
        let paused = active.paused;
        let worker = active.worker.as_ref()?;
        worker.pause();
        let (state, is_idle) = worker.with_task(|task| (task.take(index), task.is_idle()));
        if is_idle {
            active.worker = None;
        } else if !paused {
            worker.resume();
        }
        state
    }

    fn state(&self, index: u16) -> Option<QueueState> {
        lock(&self.active).worker.as_ref()?.with_task(|task| task.state(index))
    }

    fn doorbell(&self, index: u16) -> Option<&EventFd> {
        (usize::from(index) < self.queues).then_some(&self.doorbell)
    }

    fn reset(&self) {
        lock(&self.active).driver = None;
    }

    fn pause(&self) {
        let mut active = lock(&self.active);
        active.paused = true;
        active.worker.iter().for_each(Worker::pause);
    }

    fn resume(&self) {
        let mut active = lock(&self.active);
        active.paused = false;
        active.worker.iter().for_each(Worker::resume);
    }
}

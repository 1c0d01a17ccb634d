// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Table of the queues that one thread of a device serves.

use std::io;
use std::os::fd::BorrowedFd;

use virtio_queue::Queue;

use super::chain::ring_error;
use super::notification::{ask_for_notifications, wants_interrupt};
use super::queue::DeviceQueue;
use super::queue_worker::{QueueTask, QueueWorker};
use super::{DeviceError, Driver, QueueState};
use crate::sandbox::ThreadRole;
use crate::worker::{Orders, Task, Wait};

/// Queues of a thread, and their driver.
pub(super) struct QueueTable {
    driver: Driver,
    /// Queues by index. `None` if the driver does not use the queue.
    queues: Vec<Option<DeviceQueue>>,
}

impl QueueTable {
    /// Returns the driver.
    pub(super) fn driver(&self) -> &Driver {
        &self.driver
    }

    /// Returns a queue with its driver, or `None` if the driver does not use the queue.
    pub(super) fn get(&mut self, index: u16) -> Option<(&Driver, &mut DeviceQueue)> {
        let queue = self.queues.get_mut(usize::from(index))?.as_mut()?;
        Some((&self.driver, queue))
    }

    /// Asks the driver to notify the device of all buffers that the driver adds to a queue from now on.
    pub(super) fn ask(&mut self, index: u16) -> Result<(), DeviceError> {
        let Some((driver, queue)) = self.get(index) else { return Ok(()) };
        ask_for_notifications(queue, &driver.memory.view()).map_err(ring_error(index))
    }

    /// Interrupts the driver for used buffers, unless the driver has suppressed the interrupt.
    pub(super) fn interrupt(&mut self, index: u16) -> Result<(), DeviceError> {
        let Some((driver, queue)) = self.get(index) else { return Ok(()) };
        if wants_interrupt(queue, &driver.memory.view()).map_err(ring_error(index))? {
            driver.interrupt.queue_used(index);
        }
        Ok(())
    }

    /// Calls `step` at most `most` times to serve requests of a queue. Stops earlier if `step` returns false or an order arrives. If a
    /// request was served, interrupts the driver and returns true.
    pub(super) fn batch(
        &mut self,
        index: u16,
        most: usize,
        orders: &Orders,
        mut step: impl FnMut(&mut Self) -> Result<bool, DeviceError>,
    ) -> Result<bool, DeviceError> {
        let mut some = false;
        for _ in 0..most {
            if orders.call() || !step(self)? {
                break;
            }
            some = true;
        }
        if some {
            self.interrupt(index)?;
        }
        Ok(some)
    }
}

/// Work on the queues of a device.
pub(super) trait QueueService: Send + 'static {
    /// Queue that the error names if the thread panics.
    const PANIC_QUEUE: u16;
    /// Serves all pending requests. Returns the event that the thread then waits for. After an error, the thread does not call this method
    /// again.
    ///
    /// # Errors
    /// The driver broke a rule.
    fn serve(&mut self, queues: &mut QueueTable, orders: &Orders) -> Result<Wait, DeviceError>;
    /// Returns the file that [`Wait::Source`] waits for.
    fn source(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    /// Cleans up after [`serve`](Self::serve) has failed, before the driver is notified of the failure.
    fn failed(&mut self) {}
}

/// Task of a thread that serves queues with `S`.
pub(super) struct TableTask<S> {
    pub(super) service: S,
    table: QueueTable,
    failed: bool,
}

impl<S: QueueService> TableTask<S> {
    /// Returns a task for at most `queues` queues of `driver`. No queue is started yet.
    pub(super) fn new(service: S, driver: Driver, queues: usize) -> Self {
        let table = QueueTable { driver, queues: (0..queues).map(|_| None).collect() };
        Self { service, table, failed: false }
    }
}

impl<S: QueueService> QueueTask for TableTask<S> {
    fn put(&mut self, index: u16, queue: Queue) {
        if let Some(place) = self.table.queues.get_mut(usize::from(index)) {
            *place = Some(DeviceQueue::new(index, queue, &self.table.driver));
        }
    }

    fn take(&mut self, index: u16) -> Option<QueueState> {
        let queue = self.table.queues.get_mut(usize::from(index))?.take()?;
        Some(QueueState::of(&queue))
    }

    fn state(&self, index: u16) -> Option<QueueState> {
        self.table.queues.get(usize::from(index))?.as_ref().map(|queue| QueueState::of(queue))
    }

    fn is_idle(&self) -> bool {
        self.table.queues.iter().all(Option::is_none)
    }
}

impl<S: QueueService> Task for TableTask<S> {
    fn run(&mut self, orders: &Orders) -> Wait {
        if self.failed {
            return Wait::Doorbell;
        }
        self.service.serve(&mut self.table, orders).unwrap_or_else(|error| {
            self.failed = true;
            self.service.failed();
            self.table.driver.interrupt.failed(&error);
            Wait::Doorbell
        })
    }

    fn source(&self) -> Option<BorrowedFd<'_>> {
        self.service.source()
    }

    fn panicked(&self) {
        self.table.driver.interrupt.failed(&DeviceError::Panicked { queue: S::PANIC_QUEUE });
    }
}

/// Worker of a device that serves its queues with `S`.
pub(super) type TableWorker<S> = QueueWorker<TableTask<S>>;

impl<S: QueueService> TableWorker<S> {
    /// Returns a worker that serves `queues` queues with one thread called `thread`. The worker calls `make` when a driver starts its first
    /// queue.
    ///
    /// # Errors
    /// The process has no free file descriptor.
    pub(super) fn serving(
        thread: String,
        role: ThreadRole,
        queues: usize,
        make: impl Fn() -> io::Result<S> + Send + Sync + 'static,
    ) -> io::Result<Self> {
        Self::new(thread, role, queues, move |driver, index, queue| {
            let mut task = TableTask::new(make()?, driver, queues);
            task.put(index, queue);
            Ok(task)
        })
    }
}

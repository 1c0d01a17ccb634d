// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Control queue of a network card with several queue pairs. vhost-user servers do not serve control queues. So the front end reads the
//! number of pairs that the driver uses, and disables the queues of all other pairs.

use std::io;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};

use virtio_queue::Queue;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::ROLE;
use super::watcher::Shared;
use crate::peer_timeouts::Operation;
use crate::sync::lock;
use crate::virtio::net::{Control, Pairs, control_queue};
use crate::virtio::{Driver, QueueState};
use crate::worker::Worker;

/// Server of the device, which receives the number of queue pairs in use.
struct Server {
    id: String,
    shared: Arc<Shared>,
}

impl Pairs for Server {
    fn id(&self) -> &str {
        &self.id
    }

    fn set_pairs(&self, pairs: u16) -> io::Result<()> {
        // The session sends a request for each queue. These requests share the time limit of one operation.
        let _operation = Operation::begin();
        self.shared.session_first().set_pairs(pairs).map_err(io::Error::other)
    }
}

/// State that changes with the driver.
#[derive(Default)]
struct Active {
    driver: Option<Driver>,
    worker: Option<Worker<Control>>,
    paused: bool,
}

/// Control queue.
pub(super) struct ControlQueue {
    /// Number of queue pairs of the device.
    most: u16,
    server: Arc<Server>,
    /// Doorbell of the queue after the last pair.
    doorbell: EventFd,
    /// Number of queue pairs that the driver uses.
    pairs: Arc<AtomicU16>,
    active: Mutex<Active>,
}

impl ControlQueue {
    /// Returns the control queue of device `id` with `most` queue pairs.
    pub(super) fn new(id: &str, most: u16, shared: Arc<Shared>) -> io::Result<Self> {
        Ok(Self {
            most,
            server: Arc::new(Server { id: id.into(), shared }),
            doorbell: EventFd::new(EFD_NONBLOCK)?,
            pairs: Arc::new(AtomicU16::new(1)),
            active: Mutex::default(),
        })
    }

    /// True if the control queue has index `index`. The index of the control queue depends on the features that the driver accepted.
    pub(super) fn has_index(&self, index: u16) -> bool {
        let driver_features = lock(&self.active).driver.as_ref().map_or(0, |driver| driver.features);
        index == control_queue(driver_features, self.most)
    }

    /// Returns the doorbell if queue `index` is the queue after the last pair.
    pub(super) fn doorbell(&self, index: u16) -> Option<&EventFd> {
        (index == 2 * self.most).then_some(&self.doorbell)
    }

    pub(super) fn activate(&self, driver: Driver) {
        self.pairs.store(1, Ordering::Release);
        lock(&self.active).driver = Some(driver);
    }

    /// Starts the control queue, which has index `index`. The caller passes the doorbell that the driver's notifications write.
    pub(super) fn start(&self, index: u16, queue: Queue, doorbell: &EventFd) -> io::Result<()> {
        let mut active = lock(&self.active);
        let Some(driver) = active.driver.clone() else { return Ok(()) };
        let task = Control::new(index, queue, driver, self.server.clone(), self.most, self.pairs.clone());
        let name = format!("{}_q{index}", self.server.id);
        // The worker has this role because it sends messages to the server.
        let worker = Worker::spawn(name, ROLE, doorbell.try_clone()?, active.paused, task)?;
        active.worker = Some(worker);
        Ok(())
    }

    pub(super) fn stop(&self) -> Option<QueueState> {
        // This line releases the lock, so that this thread does not hold the lock while it waits for the worker.
        let worker = lock(&self.active).worker.take()?;
        Some(worker.stop(|task| task.state()))
    }

    /// Returns the position of the control queue of a paused device.
    pub(super) fn state(&self) -> Option<QueueState> {
        lock(&self.active).worker.as_ref().map(|worker| worker.with_task(|task| task.state()))
    }

    pub(super) fn reset(&self) {
        lock(&self.active).driver = None;
    }

    pub(super) fn pause(&self) {
        let mut active = lock(&self.active);
        active.paused = true;
        active.worker.iter().for_each(Worker::pause);
    }

    pub(super) fn resume(&self) {
        let mut active = lock(&self.active);
        active.paused = false;
        active.worker.iter().for_each(Worker::resume);
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The control queue of a network card with several pairs of queues. Servers have none: the front end reads how many pairs the driver
//! uses, and turns the queues of the others off.

use std::io;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};

use virtio_queue::Queue;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::ROLE;
use super::watcher::Shared;
use crate::patience::Operation;
use crate::sync::lock;
use crate::virtio::net::{Control, Pairs, control_queue};
use crate::virtio::{Driver, QueueState};
use crate::worker::Worker;

/// Has the server use so many pairs.
struct Server {
    id: String,
    shared: Arc<Shared>,
}

impl Pairs for Server {
    fn id(&self) -> &str {
        &self.id
    }

    fn set_pairs(&self, pairs: u16) -> io::Result<()> {
        // A request for each queue, and they have the time of one together.
        let _operation = Operation::begin();
        self.shared.session_first().set_pairs(pairs).map_err(io::Error::other)
    }
}

/// What changes with the driver.
#[derive(Default)]
struct Active {
    driver: Option<Driver>,
    worker: Option<Worker<Control>>,
    paused: bool,
}

/// The queue.
pub(super) struct ControlQueue {
    /// Pairs of queues of the device.
    most: u16,
    server: Arc<Server>,
    /// The event of the number behind all pairs.
    doorbell: EventFd,
    /// Pairs that the driver uses.
    pairs: Arc<AtomicU16>,
    active: Mutex<Active>,
}

impl ControlQueue {
    /// Of a device `id` with `most` pairs of queues.
    pub(super) fn new(id: &str, most: u16, shared: Arc<Shared>) -> io::Result<Self> {
        Ok(Self {
            most,
            server: Arc::new(Server { id: id.into(), shared }),
            doorbell: EventFd::new(EFD_NONBLOCK)?,
            pairs: Arc::new(AtomicU16::new(1)),
            active: Mutex::default(),
        })
    }

    /// True if it has this number. That depends on what the driver accepted.
    pub(super) fn has_index(&self, index: u16) -> bool {
        let driver_features = lock(&self.active).driver.as_ref().map_or(0, |driver| driver.features);
        index == control_queue(driver_features, self.most)
    }

    /// The event of queue `index`, if that number is behind all pairs.
    pub(super) fn doorbell(&self, index: u16) -> Option<&EventFd> {
        (index == 2 * self.most).then_some(&self.doorbell)
    }

    pub(super) fn activate(&self, driver: Driver) {
        self.pairs.store(1, Ordering::Release);
        lock(&self.active).driver = Some(driver);
    }

    /// Starts it as queue `index`, whose notifications ring `doorbell`.
    pub(super) fn start(&self, index: u16, queue: Queue, doorbell: &EventFd) -> io::Result<()> {
        let mut active = lock(&self.active);
        let Some(driver) = active.driver.clone() else { return Ok(()) };
        let task = Control::new(index, queue, driver, self.server.clone(), self.most, self.pairs.clone());
        let name = format!("{}_q{index}", self.server.id);
        // It sends messages to the server.
        let worker = Worker::spawn(name, ROLE, doorbell.try_clone()?, active.paused, task)?;
        active.worker = Some(worker);
        Ok(())
    }

    pub(super) fn stop(&self) -> Option<QueueState> {
        // Taken out first: the worker may be waited for without the lock.
        let worker = lock(&self.active).worker.take()?;
        Some(worker.stop(|task| task.state()))
    }

    /// How far it is served, in a device that is paused.
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

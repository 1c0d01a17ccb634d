// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The device as the transport sees it.

use std::io;
use std::sync::{Arc, Mutex};

use virtio_queue::Queue;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::config_space;
use super::counters::BlockCounters;
use super::disk::Disk;
use super::image::error::ResizeError;
use super::queue::requests::Requests;
use super::spec::{CONFIG_BYTES, DEVICE_TYPE, PCI_CLASS};
use super::state::{BlockState, STATE};
use crate::sandbox::{ThreadRole, calls};
use crate::state::{DeviceState, StateError};
use crate::sync::lock;
use crate::virtio::{Driver, QueueState, VirtioDevice};
use crate::worker::Worker;

/// Role of the threads that serve a queue each: read and write the image.
pub const ROLE: ThreadRole =
    ThreadRole { name: "block", calls: &[calls::AT_PLACES, calls::POLICY, calls::URING, calls::WAITING] };

/// What changes with the driver.
#[derive(Default)]
struct Active {
    driver: Option<Driver>,
    /// By queue.
    workers: Vec<Option<Worker<Requests>>>,
    paused: bool,
}

/// A disk.
pub struct VirtioBlock {
    disk: Arc<Disk>,
    features: u64,
    /// All of the configuration but the disk's size.
    config: [u8; CONFIG_BYTES],
    queue_sizes: Vec<u16>,
    /// By queue.
    doorbells: Vec<EventFd>,
    active: Mutex<Active>,
}

impl VirtioBlock {
    /// # Errors
    /// The process can have no more descriptors.
    pub(super) fn new(disk: Disk, queues: u16, queue_size: u16) -> io::Result<Self> {
        let active = Active { workers: (0..queues).map(|_| None).collect(), ..Active::default() };
        Ok(Self {
            features: config_space::features(&disk.image, queues),
            config: config_space::bytes(&disk.image, queues, queue_size),
            disk: Arc::new(disk),
            queue_sizes: vec![queue_size; queues.into()],
            doorbells: (0..queues).map(|_| EventFd::new(EFD_NONBLOCK)).collect::<io::Result<_>>()?,
            active: Mutex::new(active),
        })
    }

    /// What it has done.
    pub fn counters(&self) -> BlockCounters {
        self.disk.counts.read()
    }

    /// Gives the disk another size, and tells the driver. Requests that are under way end before; others wait for it.
    ///
    /// # Errors
    /// Why it keeps its size.
    pub fn resize(&self, bytes: u64) -> Result<(), ResizeError> {
        let driver = {
            let active = lock(&self.active);
            let running = || active.workers.iter().flatten().filter(|_| !active.paused);
            running().for_each(Worker::pause);
            let resized = self.disk.image.resize(bytes);
            running().for_each(Worker::resume);
            resized?;
            active.driver.clone()
        };
        if let Some(driver) = driver {
            driver.interrupt.config_changed(true);
        }
        Ok(())
    }
}

impl VirtioDevice for VirtioBlock {
    fn device_type(&self) -> u16 {
        DEVICE_TYPE
    }

    fn pci_class(&self) -> u32 {
        PCI_CLASS
    }

    fn features(&self) -> u64 {
        self.features
    }

    fn queue_sizes(&self) -> &[u16] {
        &self.queue_sizes
    }

    fn config_len(&self) -> usize {
        CONFIG_BYTES
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        let mut config = self.config;
        let capacity = config_space::capacity(&self.disk.image);
        config[..capacity.len()].copy_from_slice(&capacity);
        for (value, byte) in data.iter_mut().zip(config.iter().skip(offset)) {
            *value = *byte;
        }
    }

    fn write_config(&self, _: usize, _: &[u8]) {}

    fn activate(&self, driver: Driver) {
        lock(&self.active).driver = Some(driver);
    }

    fn start_queue(&self, index: u16, queue: Queue) -> io::Result<()> {
        let mut active = lock(&self.active);
        let Some(driver) = active.driver.clone() else { return Ok(()) };
        let Some(doorbell) = self.doorbells.get(usize::from(index)) else { return Ok(()) };
        let requests = Requests::new(index, queue, driver, self.disk.clone(), doorbell)?;
        // As in Cloud Hypervisor: the name of the device and of the queue.
        let thread = format!("{}_q{index}", self.disk.id);
        let (cpus, bell) = (self.disk.affinity.get(&index).copied(), doorbell.try_clone()?);
        let worker = Worker::spawn_on(cpus, thread, ROLE, bell, active.paused, requests)?;
        active.workers[usize::from(index)] = Some(worker);
        Ok(())
    }

    fn stop_queue(&self, index: u16) -> Option<QueueState> {
        // The disk keeps its size while what the worker has under way ends.
        let mut active = lock(&self.active);
        let worker = active.workers.get_mut(usize::from(index))?.take()?;
        Some(worker.stop(|requests| requests.state()))
    }

    fn queue_state(&self, index: u16) -> Option<QueueState> {
        let active = lock(&self.active);
        let worker = active.workers.get(usize::from(index))?.as_ref()?;
        Some(worker.with_task(|requests| requests.state()))
    }

    fn doorbell(&self, queue: u16) -> Option<&EventFd> {
        self.doorbells.get(usize::from(queue))
    }

    fn reset(&self) {
        lock(&self.active).driver = None;
    }

    fn pause(&self) {
        let mut active = lock(&self.active);
        active.paused = true;
        active.workers.iter().flatten().for_each(Worker::pause);
    }

    fn resume(&self) {
        let mut active = lock(&self.active);
        active.paused = false;
        active.workers.iter().flatten().for_each(Worker::resume);
    }

    fn save(&self) -> Result<DeviceState, StateError> {
        let image = &self.disk.image;
        let settled = image.settle();
        settled.map_err(|source| StateError::Host { what: "writing the image's tables to its file".into(), source })?;
        DeviceState::new(STATE.0, STATE.1, &BlockState { sectors: image.sectors(), block_size: image.block() })
    }

    /// The device comes paused, as all are that are restored.
    fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
        let BlockState { sectors, block_size } = state.payload(STATE.0, STATE.1)?;
        let image = &self.disk.image;
        for (field, saved, now) in
            [("sectors", sectors, image.sectors()), ("block_size", block_size.into(), image.block().into())]
        {
            if saved != now {
                let rule = format!("is {saved}, but {now} of the image that there is now");
                return Err(StateError::rule(field, rule));
            }
        }
        lock(&self.active).paused = true;
        Ok(())
    }
}

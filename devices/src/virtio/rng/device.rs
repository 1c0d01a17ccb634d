// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The device as the transport sees it.

use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex};

use virtio_bindings::bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::Queue;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::counters::{Counts, RngCounters};
use super::requests::Requests;
use super::spec::{DEVICE_TYPE, PCI_CLASS, REQUEST_QUEUE};
use super::state::{self, STATE};
use crate::sandbox::ThreadRole;
use crate::state::{DeviceState, StateError};
use crate::sync::lock;
use crate::virtio::{DeviceError, Driver, QueueState, VirtioDevice};
use crate::worker::Worker;

/// Role of the thread that reads random bytes from a file for a guest.
pub const ROLE: ThreadRole = ThreadRole { name: "rng", calls: &[] };

/// Largest size of the queue. A driver has one request at a time in it.
const QUEUE_SIZES: [u16; 1] = [256];

/// What changes with the driver.
#[derive(Default)]
struct Active {
    driver: Option<Driver>,
    worker: Option<Worker<Requests>>,
    paused: bool,
}

/// A virtio-rng device.
pub struct VirtioRng {
    /// Name of the worker's thread: as in Cloud Hypervisor, that of the device and of the queue.
    thread: String,
    source: Arc<File>,
    doorbell: EventFd,
    counts: Arc<Counts>,
    active: Mutex<Active>,
}

impl VirtioRng {
    /// A device that gives bytes of `source`.
    ///
    /// # Errors
    /// The process can have no more descriptors.
    pub(super) fn new(id: &str, source: File) -> io::Result<Self> {
        Ok(Self {
            thread: format!("{id}_q{REQUEST_QUEUE}"),
            source: Arc::new(source),
            doorbell: EventFd::new(EFD_NONBLOCK)?,
            counts: Arc::default(),
            active: Mutex::default(),
        })
    }

    /// What it has done.
    pub fn counters(&self) -> RngCounters {
        self.counts.read()
    }
}

impl VirtioDevice for VirtioRng {
    fn device_type(&self) -> u16 {
        DEVICE_TYPE
    }

    fn pci_class(&self) -> u32 {
        PCI_CLASS
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn config_len(&self) -> usize {
        0
    }

    fn read_config(&self, _: usize, _: &mut [u8]) {}

    fn write_config(&self, _: usize, _: &[u8]) {}

    fn activate(&self, driver: Driver) {
        lock(&self.active).driver = Some(driver);
    }

    fn start_queue(&self, index: u16, queue: Queue) -> io::Result<()> {
        let mut active = lock(&self.active);
        let Some(driver) = active.driver.clone().filter(|_| index == REQUEST_QUEUE) else { return Ok(()) };
        let requests = Requests::new(queue, driver, self.source.clone(), self.counts.clone());
        let doorbell = self.doorbell.try_clone()?;
        active.worker = Some(Worker::spawn(self.thread.clone(), ROLE, doorbell, active.paused, requests)?);
        Ok(())
    }

    fn stop_queue(&self, index: u16) -> Option<QueueState> {
        // Taken out first: the worker may be waited for without the lock.
        let worker = lock(&self.active).worker.take_if(|_| index == REQUEST_QUEUE)?;
        Some(worker.stop(|requests| requests.state()))
    }

    fn queue_state(&self, index: u16) -> Option<QueueState> {
        let active = lock(&self.active);
        let worker = active.worker.as_ref().filter(|_| index == REQUEST_QUEUE)?;
        Some(worker.with_task(|requests| requests.state()))
    }

    fn doorbell(&self, queue: u16) -> Option<&EventFd> {
        (queue == REQUEST_QUEUE).then_some(&self.doorbell)
    }

    /// A vCPU that found no doorbell rings it.
    fn notify(&self, queue: u16) -> Result<(), DeviceError> {
        if queue == REQUEST_QUEUE {
            // It fails where it was rung 2^64 times already.
            let _ = self.doorbell.write(1);
        }
        Ok(())
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

    fn save(&self) -> Result<DeviceState, StateError> {
        DeviceState::new(STATE.0, STATE.1, &state::RngState {})
    }

    /// The device comes paused, as all are that are restored.
    fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
        let state::RngState {} = state.payload(STATE.0, STATE.1)?;
        lock(&self.active).paused = true;
        Ok(())
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The device as the transport sees it.

use std::io;
use std::sync::{Arc, Mutex};

use virtio_bindings::bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::Queue;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::counters::VsockCounters;
use super::hub::Ends;
use super::spec::{CONFIG_BYTES, DEVICE_TYPE, PCI_CLASS, feature};
use super::state::{STATE, VsockState};
use super::traffic::{QUEUES, Traffic};
use crate::sandbox::{ThreadRole, calls};
use crate::state::{DeviceState, StateError};
use crate::sync::lock;
use crate::virtio::{DeviceError, Driver, QueueState, VirtioDevice};
use crate::worker::Worker;

/// Role of the thread that carries bytes between sockets of the guest and of the host.
pub const ROLE: ThreadRole = ThreadRole { name: "vsock", calls: &[calls::MESSAGES, calls::SOCKETS, calls::WAITING] };

/// Largest size of each queue.
const QUEUE_SIZES: [u16; QUEUES] = [256; QUEUES];

/// What changes with the driver.
#[derive(Default)]
struct Active {
    driver: Option<Driver>,
    worker: Option<Worker<Traffic>>,
    paused: bool,
    /// The guest is one that was saved: the connections that it knows of are gone.
    restored: bool,
}

/// A vsock device. One thread serves all its queues, as what comes by one goes by another.
pub struct VirtioVsock {
    thread: String,
    ends: Arc<Ends>,
    /// Of all queues.
    doorbell: EventFd,
    active: Mutex<Active>,
}

impl VirtioVsock {
    /// # Errors
    /// The process can have no more descriptors.
    pub(super) fn new(id: &str, ends: Ends) -> io::Result<Self> {
        Ok(Self {
            thread: id.to_string(),
            ends: Arc::new(ends),
            doorbell: EventFd::new(EFD_NONBLOCK)?,
            active: Mutex::default(),
        })
    }

    /// What it has done.
    pub fn counters(&self) -> VsockCounters {
        self.ends.counts.read()
    }
}

impl VirtioDevice for VirtioVsock {
    fn device_type(&self) -> u16 {
        DEVICE_TYPE
    }

    fn pci_class(&self) -> u32 {
        PCI_CLASS
    }

    fn features(&self) -> u64 {
        feature::STREAM | 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn config_len(&self) -> usize {
        CONFIG_BYTES
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        for (value, byte) in data.iter_mut().zip(self.ends.cid.to_le_bytes().into_iter().skip(offset)) {
            *value = byte;
        }
    }

    fn write_config(&self, _: usize, _: &[u8]) {}

    fn activate(&self, driver: Driver) {
        lock(&self.active).driver = Some(driver);
    }

    fn start_queue(&self, index: u16, queue: Queue) -> io::Result<()> {
        let mut active = lock(&self.active);
        let Some(driver) = active.driver.clone() else { return Ok(()) };
        if let Some(worker) = &active.worker {
            worker.pause();
            worker.with_task(|traffic| traffic.put(index, queue));
            if !active.paused {
                worker.resume();
            }
            return Ok(());
        }
        let mut traffic = Traffic::new(self.ends.clone(), driver, active.restored)?;
        traffic.put(index, queue);
        let doorbell = self.doorbell.try_clone()?;
        active.worker = Some(Worker::spawn(self.thread.clone(), ROLE, doorbell, active.paused, traffic)?);
        Ok(())
    }

    /// With its last queue the thread ends, and so do all connections.
    fn stop_queue(&self, index: u16) -> Option<QueueState> {
        let mut active = lock(&self.active);
        let paused = active.paused;
        let worker = active.worker.as_ref()?;
        worker.pause();
        let (state, idle) = worker.with_task(|traffic| (traffic.take(index), traffic.is_idle()));
        if idle {
            active.worker = None;
        } else if !paused {
            worker.resume();
        }
        state
    }

    fn queue_state(&self, index: u16) -> Option<QueueState> {
        let active = lock(&self.active);
        active.worker.as_ref()?.with_task(|traffic| traffic.state(index))
    }

    fn doorbell(&self, queue: u16) -> Option<&EventFd> {
        (usize::from(queue) < QUEUES).then_some(&self.doorbell)
    }

    /// A vCPU that found no doorbell rings it.
    fn notify(&self, queue: u16) -> Result<(), DeviceError> {
        if let Some(doorbell) = self.doorbell(queue) {
            // It fails where it was rung 2^64 times already.
            let _ = doorbell.write(1);
        }
        Ok(())
    }

    fn reset(&self) {
        let mut active = lock(&self.active);
        (active.driver, active.restored) = (None, false);
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
        DeviceState::new(STATE.0, STATE.1, &VsockState {})
    }

    /// The device comes paused, as all are that are restored.
    fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
        let VsockState {} = state.payload(STATE.0, STATE.1)?;
        let mut active = lock(&self.active);
        active.paused = true;
        active.restored = active.driver.is_some();
        Ok(())
    }
}

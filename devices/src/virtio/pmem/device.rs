// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The device as the transport sees it.

use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex};

use virtio_bindings::bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::Queue;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::PmemError;
use super::counters::{Counts, PmemCounters};
use super::memory::Memory;
use super::requests::Requests;
use super::spec::{CONFIG_BYTES, DEVICE_TYPE, PCI_CLASS, REQUEST_QUEUE, SHMID, feature};
use super::state::{PmemState, STATE};
use crate::platform::MemorySlots;
use crate::sandbox::{ThreadRole, calls};
use crate::state::{DeviceState, StateError};
use crate::sync::lock;
use crate::virtio::{DeviceError, Driver, QueueState, SharedRegion, TransportError, VirtioDevice};
use crate::worker::Worker;

/// Role of the thread that serves the queue: flushes the file.
pub const ROLE: ThreadRole = ThreadRole { name: "pmem", calls: &[calls::AT_PLACES] };

/// Largest size of the queue.
const QUEUE_SIZES: [u16; 1] = [256];

/// What changes with the driver.
#[derive(Default)]
struct Active {
    driver: Option<Driver>,
    worker: Option<Worker<Requests>>,
    paused: bool,
}

/// A virtio-pmem device.
pub struct VirtioPmem {
    /// Name of the worker's thread.
    thread: String,
    /// What is flushed; `None` where writes are discarded.
    file: Option<Arc<File>>,
    memory: Memory,
    size: u64,
    doorbell: EventFd,
    counts: Arc<Counts>,
    active: Mutex<Active>,
}

impl VirtioPmem {
    /// A device of the first `size` bytes of `file`, which messages call `path`.
    ///
    /// # Errors
    /// The file cannot be mapped, or the process can have no more descriptors.
    pub(super) fn new(
        id: &str,
        file: File,
        path: &str,
        size: u64,
        discard_writes: bool,
        slots: Arc<dyn MemorySlots>,
    ) -> Result<Self, PmemError> {
        let (file, name) = (Arc::new(file), format!("persistent memory '{id}', file {path}"));
        let memory = Memory::map(&file, name, size, discard_writes, slots).map_err(PmemError::Map)?;
        Ok(Self {
            thread: format!("{id}_q{REQUEST_QUEUE}"),
            file: (!discard_writes).then_some(file),
            memory,
            size,
            doorbell: EventFd::new(EFD_NONBLOCK).map_err(TransportError::Descriptors)?,
            counts: Arc::default(),
            active: Mutex::default(),
        })
    }

    /// What it has done.
    pub fn counters(&self) -> PmemCounters {
        self.counts.read()
    }
}

impl VirtioDevice for VirtioPmem {
    fn device_type(&self) -> u16 {
        DEVICE_TYPE
    }

    fn pci_class(&self) -> u32 {
        PCI_CLASS
    }

    fn features(&self) -> u64 {
        feature::SHMEM_REGION | 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn config_len(&self) -> usize {
        CONFIG_BYTES
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        let start = self.memory.address().unwrap_or(0);
        let config = start.to_le_bytes().into_iter().chain(self.size.to_le_bytes());
        for (value, byte) in data.iter_mut().zip(config.skip(offset)) {
            *value = byte;
        }
    }

    fn write_config(&self, _: usize, _: &[u8]) {}

    fn activate(&self, driver: Driver) {
        lock(&self.active).driver = Some(driver);
    }

    fn start_queue(&self, index: u16, queue: Queue) -> io::Result<()> {
        let mut active = lock(&self.active);
        let Some(driver) = active.driver.clone().filter(|_| index == REQUEST_QUEUE) else { return Ok(()) };
        let requests = Requests::new(queue, driver, self.file.clone(), self.counts.clone());
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

    fn shared_region(&self) -> Option<SharedRegion> {
        Some(SharedRegion { id: SHMID, size: self.size })
    }

    fn shared_region_moved(&self, address: u64) -> io::Result<()> {
        self.memory.show(address)
    }

    fn shared_region_released(&self) -> io::Result<()> {
        self.memory.hide()
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

    /// What a file holds that the guest writes to is there for the VM that is restored. What is discarded is not.
    fn save(&self) -> Result<DeviceState, StateError> {
        if self.file.is_none() {
            return Err(StateError::Unsupported("memory whose writes are discarded is nowhere but in this process"));
        }
        DeviceState::new(STATE.0, STATE.1, &PmemState { size: self.size })
    }

    /// The device comes paused, as all are that are restored.
    fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
        let PmemState { size } = state.payload(STATE.0, STATE.1)?;
        if size != self.size {
            let rule = format!("is {size} bytes, and the device has {}", self.size);
            return Err(StateError::rule("size", rule));
        }
        lock(&self.active).paused = true;
        Ok(())
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The device as the transport sees it.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use virtio_bindings::bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::Queue;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::BalloonParams;
use super::counters::{BalloonCounters, Counts};
use super::spec::{CONFIG_BYTES, DEVICE_TYPE, PAGE, PCI_CLASS, feature};
use super::state::{BalloonState, STATE};
use super::traffic::{QUEUES, Traffic};
use crate::reclaim::Reclaim;
use crate::sandbox::ThreadRole;
use crate::state::{DeviceState, StateError};
use crate::sync::lock;
use crate::virtio::{DeviceError, Driver, QueueState, VirtioDevice};
use crate::worker::Worker;

/// Role of the thread that gives memory of the guest back to the host.
pub const ROLE: ThreadRole = ThreadRole { name: "balloon", calls: &[] };

/// Largest sizes of the queues.
const QUEUE_SIZES: [u16; QUEUES] = [128; QUEUES];

/// What changes with the driver.
#[derive(Default)]
struct Active {
    driver: Option<Driver>,
    /// Serves all queues.
    worker: Option<Worker<Traffic>>,
    paused: bool,
}

/// A virtio-balloon device.
pub struct VirtioBalloon {
    /// Name of the worker's thread.
    thread: String,
    features: u64,
    reclaim: Arc<Reclaim>,
    counts: Arc<Counts>,
    /// Pages that the balloon should have.
    wanted: AtomicU32,
    /// Pages that it has, as the driver says.
    actual: AtomicU32,
    /// Of all queues.
    doorbell: EventFd,
    active: Mutex<Active>,
}

fn pages(bytes: u64) -> u32 {
    u32::try_from(bytes / PAGE).unwrap_or(u32::MAX)
}

impl VirtioBalloon {
    /// # Errors
    /// The process can have no more descriptors.
    pub(super) fn new(params: &BalloonParams) -> io::Result<Self> {
        let feature = |offered, bit| if offered { bit } else { 0 };
        Ok(Self {
            thread: params.id.clone(),
            features: feature(params.deflate_on_oom, feature::DEFLATE_ON_OOM)
                | feature(params.free_page_reporting, feature::REPORTING),
            reclaim: params.reclaim.clone(),
            counts: Arc::default(),
            wanted: AtomicU32::new(pages(params.size)),
            actual: AtomicU32::new(0),
            doorbell: EventFd::new(EFD_NONBLOCK)?,
            active: Mutex::default(),
        })
    }

    /// What it has done.
    pub fn counters(&self) -> BalloonCounters {
        self.counts.read()
    }

    /// Bytes that the driver says are in the balloon. It may say anything.
    pub fn actual_size(&self) -> u64 {
        u64::from(self.actual.load(Ordering::Relaxed)) * PAGE
    }

    /// Has the driver make the balloon as large as this, in whole pages.
    pub fn resize(&self, bytes: u64) {
        self.wanted.store(pages(bytes), Ordering::Relaxed);
        // Without the lock: the transport has its own.
        let driver = lock(&self.active).driver.clone();
        if let Some(driver) = driver {
            driver.interrupt.config_changed(true);
        }
    }

    /// The work of its thread, without the thread.
    pub(super) fn traffic(&self, driver: Driver) -> Traffic {
        Traffic::new(driver, self.reclaim.clone(), self.counts.clone())
    }

    fn config(&self) -> [u8; CONFIG_BYTES] {
        let field = |pages: &AtomicU32| pages.load(Ordering::Relaxed).to_le_bytes();
        let [wanted, actual] = [field(&self.wanted), field(&self.actual)];
        std::array::from_fn(|index| if index < 4 { wanted[index] } else { actual[index - 4] })
    }
}

impl VirtioDevice for VirtioBalloon {
    fn device_type(&self) -> u16 {
        DEVICE_TYPE
    }

    fn pci_class(&self) -> u32 {
        PCI_CLASS
    }

    fn features(&self) -> u64 {
        self.features | 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX
    }

    fn queue_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn config_len(&self) -> usize {
        CONFIG_BYTES
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        for (value, byte) in data.iter_mut().zip(self.config().into_iter().skip(offset)) {
            *value = byte;
        }
    }

    /// The driver says how many pages there are: the second field. It writes it whole.
    fn write_config(&self, offset: usize, data: &[u8]) {
        if let (4, Ok(actual)) = (offset, data.try_into()) {
            self.actual.store(u32::from_le_bytes(actual), Ordering::Relaxed);
        }
    }

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
        let mut traffic = self.traffic(driver);
        traffic.put(index, queue);
        let doorbell = self.doorbell.try_clone()?;
        active.worker = Some(Worker::spawn(self.thread.clone(), ROLE, doorbell, active.paused, traffic)?);
        Ok(())
    }

    /// With its last queue the thread ends.
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

    /// The driver that comes next has no pages in the balloon.
    fn reset(&self) {
        lock(&self.active).driver = None;
        self.actual.store(0, Ordering::Relaxed);
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
        let read = |pages: &AtomicU32| pages.load(Ordering::Relaxed);
        let state = BalloonState { wanted: read(&self.wanted), actual: read(&self.actual) };
        DeviceState::new(STATE.0, STATE.1, &state)
    }

    /// The device comes paused, as all are that are restored.
    fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
        let BalloonState { wanted, actual } = state.payload(STATE.0, STATE.1)?;
        lock(&self.active).paused = true;
        self.wanted.store(wanted, Ordering::Relaxed);
        self.actual.store(actual, Ordering::Relaxed);
        Ok(())
    }
}

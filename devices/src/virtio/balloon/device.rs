// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio-balloon device and its implementation of `VirtioDevice`.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use virtio_bindings::bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::BalloonParams;
use super::counters::{BalloonCounters, Counts};
use super::spec::{CONFIG_BYTES, DEVICE_TYPE, PAGE, PCI_CLASS, feature};
use super::state::{BalloonState, STATE};
use super::traffic::{QUEUES, Traffic};
use crate::sandbox::ThreadRole;
use crate::state::{DeviceState, StateError};
use crate::virtio::device::read_bytes;
use crate::virtio::queue_table::TableWorker;
use crate::virtio::{DeviceProperties, DeviceQueues, VirtioDevice};

/// Role of the thread that returns guest memory to the host.
pub const ROLE: ThreadRole = ThreadRole { name: "balloon", calls: &[] };

/// Maximum sizes of the queues.
const QUEUE_SIZES: [u16; QUEUES] = [128; QUEUES];

/// A virtio-balloon device.
pub struct VirtioBalloon {
    features: u64,
    counts: Arc<Counts>,
    /// Target size of the balloon, in pages.
    wanted: AtomicU32,
    /// Size of the balloon in pages, as reported by the driver.
    actual: AtomicU32,
    queues: TableWorker<Traffic>,
}

fn pages(bytes: u64) -> u32 {
    u32::try_from(bytes / PAGE).unwrap_or(u32::MAX)
}

impl VirtioBalloon {
    /// # Errors
    /// The process has no free file descriptor.
    pub(super) fn new(params: &BalloonParams) -> io::Result<Self> {
        let feature = |offered, bit| if offered { bit } else { 0 };
        let (reclaim, counts) = (params.reclaim.clone(), Arc::<Counts>::default());
        let of_traffic = counts.clone();
        let make = move || Ok(Traffic::new(reclaim.clone(), of_traffic.clone()));
        Ok(Self {
            features: feature(params.deflate_on_oom, feature::DEFLATE_ON_OOM)
                | feature(params.free_page_reporting, feature::REPORTING),
            counts,
            wanted: AtomicU32::new(pages(params.size)),
            actual: AtomicU32::new(0),
            queues: TableWorker::serving(params.id.clone(), ROLE, QUEUES, make)?,
        })
    }

    /// Returns the counters.
    pub fn counters(&self) -> BalloonCounters {
        self.counts.read()
    }

    /// Returns the size of the balloon in bytes, as reported by the driver. The device does not check this value.
    pub fn actual_size(&self) -> u64 {
        u64::from(self.actual.load(Ordering::Relaxed)) * PAGE
    }

    /// Sets the balloon's target size in bytes, rounded down to whole pages, and notifies the driver.
    pub fn resize(&self, bytes: u64) {
        self.wanted.store(pages(bytes), Ordering::Relaxed);
        if let Some(driver) = self.queues.driver() {
            driver.interrupt.config_changed(true);
        }
    }
}

impl VirtioDevice for VirtioBalloon {
    fn properties(&self) -> DeviceProperties<'_> {
        let features = self.features | 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX;
        DeviceProperties::new(DEVICE_TYPE, PCI_CLASS, features, &QUEUE_SIZES, CONFIG_BYTES)
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        let config = [&self.wanted, &self.actual].map(|pages| pages.load(Ordering::Relaxed).to_le_bytes());
        read_bytes(config.as_flattened(), offset, data);
    }

    /// Stores the size that the driver reports, in pages. The size is the second field of the configuration, at offset 4. Writes that do
    /// not cover exactly this field are ignored.
    fn write_config(&self, offset: usize, data: &[u8]) {
        if let (4, Ok(actual)) = (offset, data.try_into()) {
            self.actual.store(u32::from_le_bytes(actual), Ordering::Relaxed);
        }
    }

    /// Resets the device. The next driver starts with an empty balloon.
    fn reset(&self) {
        self.queues.reset();
        self.actual.store(0, Ordering::Relaxed);
    }

    fn queues(&self) -> Option<&dyn DeviceQueues> {
        Some(&self.queues)
    }

    fn save(&self) -> Result<DeviceState, StateError> {
        let read = |pages: &AtomicU32| pages.load(Ordering::Relaxed);
        let state = BalloonState { wanted: read(&self.wanted), actual: read(&self.actual) };
        DeviceState::new(STATE.0, STATE.1, &state)
    }

    /// Restores the device. A restored device is always paused.
    fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
        let BalloonState { wanted, actual } = state.payload(STATE.0, STATE.1)?;
        self.queues.restore_paused();
        self.wanted.store(wanted, Ordering::Relaxed);
        self.actual.store(actual, Ordering::Relaxed);
        Ok(())
    }
}

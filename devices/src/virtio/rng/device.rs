// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio-rng device and its implementation of `VirtioDevice`.

use std::fs::File;
use std::io;
use std::sync::Arc;

use virtio_bindings::bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::counters::{Counts, RngCounters};
use super::requests::Requests;
use super::spec::{DEVICE_TYPE, PCI_CLASS, REQUEST_QUEUE};
use super::state::{self, STATE};
use crate::sandbox::ThreadRole;
use crate::state::{DeviceState, StateError};
use crate::virtio::queue_table::TableWorker;
use crate::virtio::{DeviceProperties, DeviceQueues, VirtioDevice};

/// Role of the thread that reads random bytes from a file for a guest.
pub const ROLE: ThreadRole = ThreadRole { name: "rng", calls: &[] };

/// Maximum size of the queue. Linux's driver has only one request at a time in the queue.
const QUEUE_SIZES: [u16; 1] = [256];

/// A virtio-rng device.
pub struct VirtioRng {
    counts: Arc<Counts>,
    queues: TableWorker<Requests>,
}

impl VirtioRng {
    /// Creates a device that reads its bytes from `source`.
    ///
    /// # Errors
    /// The process has no free file descriptor.
    pub(super) fn new(id: &str, source: File) -> io::Result<Self> {
        let (source, counts) = (Arc::new(source), Arc::<Counts>::default());
        let of_requests = counts.clone();
        let make = move || Ok(Requests::new(source.clone(), of_requests.clone()));
        // The thread has the same name as in Cloud Hypervisor: device name, then queue number.
        let queues = TableWorker::serving(format!("{id}_q{REQUEST_QUEUE}"), ROLE, 1, make)?;
        Ok(Self { counts, queues })
    }

    /// Returns the counters.
    pub fn counters(&self) -> RngCounters {
        self.counts.read()
    }
}

impl VirtioDevice for VirtioRng {
    fn properties(&self) -> DeviceProperties<'_> {
        let features = 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX;
        DeviceProperties::new(DEVICE_TYPE, PCI_CLASS, features, &QUEUE_SIZES, 0)
    }

    fn read_config(&self, _: usize, _: &mut [u8]) {}

    fn queues(&self) -> Option<&dyn DeviceQueues> {
        Some(&self.queues)
    }

    fn save(&self) -> Result<DeviceState, StateError> {
        DeviceState::new(STATE.0, STATE.1, &state::RngState {})
    }

    /// Restores the device. A restored device is always paused.
    fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
        let state::RngState {} = state.payload(STATE.0, STATE.1)?;
        self.queues.restore_paused();
        Ok(())
    }
}

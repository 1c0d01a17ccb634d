// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The vsock device and its implementation of `VirtioDevice`.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use virtio_bindings::bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::counters::VsockCounters;
use super::hub::Ends;
use super::spec::{CONFIG_BYTES, DEVICE_TYPE, PCI_CLASS, feature};
use super::state::{STATE, VsockState};
use super::traffic::{QUEUES, Traffic};
use crate::sandbox::{ThreadRole, calls};
use crate::state::{DeviceState, StateError};
use crate::virtio::device::read_bytes;
use crate::virtio::queue_table::TableWorker;
use crate::virtio::{DeviceProperties, DeviceQueues, VirtioDevice};

/// Role of the thread that moves data between sockets of the guest and sockets of the host.
pub const ROLE: ThreadRole = ThreadRole { name: "vsock", calls: &[calls::MESSAGES, calls::SOCKETS, calls::WAITING] };

/// Maximum size of each queue.
const QUEUE_SIZES: [u16; QUEUES] = [256; QUEUES];

/// A vsock device. One thread serves all queues, because a packet in one queue often causes a packet in another queue.
pub struct VirtioVsock {
    ends: Arc<Ends>,
    queues: TableWorker<Traffic>,
    /// True if the guest was restored from a saved state. In this case, the connections of the saved guest no longer exist.
    restored: Arc<AtomicBool>,
}

impl VirtioVsock {
    /// # Errors
    /// The process has no free file descriptor.
    pub(super) fn new(id: &str, ends: Ends) -> io::Result<Self> {
        let (ends, restored) = (Arc::new(ends), Arc::new(AtomicBool::new(false)));
        let of_traffic = (ends.clone(), restored.clone());
        let make = move || {
            let (ends, restored) = &of_traffic;
            Traffic::new(ends.clone(), restored.load(Ordering::Relaxed))
        };
        Ok(Self { ends, queues: TableWorker::serving(id.to_string(), ROLE, QUEUES, make)?, restored })
    }

    /// Returns the counters.
    pub fn counters(&self) -> VsockCounters {
        self.ends.counts.read()
    }
}

impl VirtioDevice for VirtioVsock {
    fn properties(&self) -> DeviceProperties<'_> {
        let features = feature::STREAM | 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX;
        DeviceProperties::new(DEVICE_TYPE, PCI_CLASS, features, &QUEUE_SIZES, CONFIG_BYTES)
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        read_bytes(&self.ends.cid.to_le_bytes(), offset, data);
    }

    fn reset(&self) {
        self.queues.reset();
        self.restored.store(false, Ordering::Relaxed);
    }

    fn queues(&self) -> Option<&dyn DeviceQueues> {
        Some(&self.queues)
    }

    fn save(&self) -> Result<DeviceState, StateError> {
        DeviceState::new(STATE.0, STATE.1, &VsockState {})
    }

    /// Restores the device. A restored device is always paused.
    fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
        let VsockState {} = state.payload(STATE.0, STATE.1)?;
        self.queues.restore_paused();
        self.restored.store(self.queues.driver().is_some(), Ordering::Relaxed);
        Ok(())
    }
}

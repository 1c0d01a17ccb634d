// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio-pmem device and its implementation of `VirtioDevice`.

use std::fs::File;
use std::io;
use std::sync::Arc;

use virtio_bindings::bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::PmemError;
use super::counters::{Counts, PmemCounters};
use super::memory::Memory;
use super::requests::Requests;
use super::spec::{CONFIG_BYTES, DEVICE_TYPE, PCI_CLASS, REQUEST_QUEUE, SHMID, feature};
use super::state::{PmemState, STATE};
use crate::platform::MemorySlots;
use crate::sandbox::{ThreadRole, calls};
use crate::state::{DeviceState, StateError};
use crate::virtio::device::read_bytes;
use crate::virtio::queue_table::TableWorker;
use crate::virtio::{DeviceProperties, DeviceQueues, SharedRegion, TransportError, VirtioDevice};

/// Role of the thread that serves the queue and flushes the file.
pub const ROLE: ThreadRole = ThreadRole { name: "pmem", calls: &[calls::AT_PLACES] };

/// Maximum size of the queue.
const QUEUE_SIZES: [u16; 1] = [256];

/// A virtio-pmem device.
pub struct VirtioPmem {
    /// File to flush. `None` if writes are discarded.
    file: Option<Arc<File>>,
    memory: Memory,
    size: u64,
    counts: Arc<Counts>,
    queues: TableWorker<Requests>,
}

impl VirtioPmem {
    /// Creates a device for the first `size` bytes of `file`. `path` is the file's name in messages.
    ///
    /// # Errors
    /// The file cannot be mapped, or the process has no free file descriptor.
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
        let (file, counts) = ((!discard_writes).then_some(file), Arc::<Counts>::default());
        let of_requests = (file.clone(), counts.clone());
        let make = move || {
            let (file, counts) = of_requests.clone();
            Ok(Requests::new(file, counts))
        };
        let queues = TableWorker::serving(format!("{id}_q{REQUEST_QUEUE}"), ROLE, 1, make);
        Ok(Self { file, memory, size, counts, queues: queues.map_err(TransportError::Descriptors)? })
    }

    /// Returns the counters.
    pub fn counters(&self) -> PmemCounters {
        self.counts.read()
    }
}

impl VirtioDevice for VirtioPmem {
    fn properties(&self) -> DeviceProperties<'_> {
        let features = feature::SHMEM_REGION | 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX;
        DeviceProperties::new(DEVICE_TYPE, PCI_CLASS, features, &QUEUE_SIZES, CONFIG_BYTES)
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        let start = self.memory.address().unwrap_or(0);
        read_bytes([start, self.size].map(u64::to_le_bytes).as_flattened(), offset, data);
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

    fn queues(&self) -> Option<&dyn DeviceQueues> {
        Some(&self.queues)
    }

    /// Saves the state. The restored VM finds the memory's content in the file. If the device discards writes, no file contains the
    /// memory's content, so the state cannot be saved.
    fn save(&self) -> Result<DeviceState, StateError> {
        if self.file.is_none() {
            return Err(StateError::Unsupported(
                "persistent memory with discard_writes=on cannot be saved, because its content is only in this process; remove the device first",
            ));
        }
        DeviceState::new(STATE.0, STATE.1, &PmemState { size: self.size })
    }

    /// Restores the device. A restored device is always paused.
    fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
        let PmemState { size } = state.payload(STATE.0, STATE.1)?;
        if size != self.size {
            let rule = format!(
                "the saved device has {size} bytes of memory, but this device has {}: restore with the file and the size that were saved",
                self.size
            );
            return Err(StateError::rule("size", rule));
        }
        self.queues.restore_paused();
        Ok(())
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio-console device and its implementation of `VirtioDevice`.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_bindings::bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::counters::ConsoleCounters;
use super::ends::{Ends, MOST_INPUT, Size};
use super::spec::{CONFIG_BYTES, DEVICE_TYPE, PCI_CLASS, feature};
use super::state::{ConsoleState, STATE};
use super::traffic::{MOST_PRINTED, QUEUES, Traffic};
use crate::sandbox::ThreadRole;
use crate::state::{DeviceState, StateError};
use crate::sync::lock;
use crate::virtio::device::read_bytes;
use crate::virtio::queue_table::TableWorker;
use crate::virtio::{DeviceProperties, DeviceQueues, Driver, VirtioDevice};

/// Role of the thread that moves bytes between the guest's console and the host.
pub const ROLE: ThreadRole = ThreadRole { name: "console", calls: &[] };

/// Maximum sizes of the queues.
const QUEUE_SIZES: [u16; QUEUES] = [256; QUEUES];

/// A virtio-console device.
pub struct VirtioConsole {
    ends: Arc<Ends>,
    queues: TableWorker<Traffic>,
}

impl VirtioConsole {
    /// Creates a device that prints to `output`.
    ///
    /// # Errors
    /// The process has no free file descriptor.
    pub(super) fn new(id: &str, output: Box<dyn Write + Send>) -> io::Result<Self> {
        let ends = Arc::new(Ends::new(output));
        let of_traffic = ends.clone();
        let make = move || Ok(Traffic::new(of_traffic.clone()));
        Ok(Self { ends, queues: TableWorker::serving(id.to_string(), ROLE, QUEUES, make)? })
    }

    /// Returns the counters.
    pub fn counters(&self) -> ConsoleCounters {
        self.ends.counts.read()
    }

    /// Adds as many of `bytes` to the guest's input as there is room for. Returns the number of accepted bytes. If no driver is active, the
    /// device accepts and drops all bytes.
    pub fn receive(&self, bytes: &[u8]) -> usize {
        let mut incoming = lock(&self.ends.incoming);
        if !incoming.driver {
            return bytes.len();
        }
        let room = (MOST_INPUT - incoming.input.len()).min(bytes.len());
        incoming.input.extend(&bytes[..room]);
        drop(incoming);
        self.queues.ring();
        room
    }

    /// Sets the size of the terminal, and notifies the driver.
    pub fn resize(&self, size: Size) {
        lock(&self.ends.incoming).size = size;
        self.queues.ring();
    }

    /// Returns the task of the device's thread without starting the thread. After this call, the device behaves as if a driver were active.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn traffic(&self) -> Traffic {
        lock(&self.ends.incoming).driver = true;
        Traffic::new(self.ends.clone())
    }

    /// Returns the number of input bytes that wait for the driver.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn waiting(&self) -> usize {
        lock(&self.ends.incoming).input.len()
    }
}

impl VirtioDevice for VirtioConsole {
    fn properties(&self) -> DeviceProperties<'_> {
        let features = feature::SIZE | 1 << VIRTIO_RING_F_INDIRECT_DESC | 1 << VIRTIO_RING_F_EVENT_IDX;
        DeviceProperties::new(DEVICE_TYPE, PCI_CLASS, features, &QUEUE_SIZES, CONFIG_BYTES)
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        let Size { columns, rows } = lock(&self.ends.incoming).size;
        read_bytes([columns, rows].map(u16::to_le_bytes).as_flattened(), offset, data);
    }

    fn activate(&self, driver: Driver) {
        self.queues.activate(driver);
        lock(&self.ends.incoming).driver = true;
    }

    fn reset(&self) {
        self.queues.reset();
        let mut incoming = lock(&self.ends.incoming);
        incoming.input.clear();
        (incoming.driver, incoming.announced) = (false, None);
        self.ends.printed.store(0, Ordering::Relaxed);
    }

    fn queues(&self) -> Option<&dyn DeviceQueues> {
        Some(&self.queues)
    }

    fn save(&self) -> Result<DeviceState, StateError> {
        let incoming = lock(&self.ends.incoming);
        let state = ConsoleState {
            input: incoming.input.iter().copied().collect(),
            announced: incoming.announced,
            printed: self.ends.printed.load(Ordering::Relaxed),
        };
        DeviceState::new(STATE.0, STATE.1, &state)
    }

    /// Restores the device. A restored device is always paused. After the resume, the driver is notified if the terminal's size has changed
    /// since the save.
    fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
        let ConsoleState { input, announced, printed } = state.payload(STATE.0, STATE.1)?;
        if input.len() > MOST_INPUT {
            let rule = format!(
                "the saved input has {} bytes, but the maximum is {MOST_INPUT}: restore from an unmodified snapshot",
                input.len()
            );
            return Err(StateError::rule("input", rule));
        }
        if printed > MOST_PRINTED {
            return Err(StateError::rule(
                "printed",
                format!(
                    "{printed} bytes of a print request were printed before the save, but a request has at most {MOST_PRINTED}: restore from an unmodified snapshot"
                ),
            ));
        }
        self.queues.restore_paused();
        self.ends.printed.store(printed, Ordering::Relaxed);
        let mut incoming = lock(&self.ends.incoming);
        (incoming.input, incoming.announced) = (input.into(), announced);
        Ok(())
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio-iommu device: its queues and configuration (virtio 1.3, section 5.13).

use std::io;
use std::sync::{Arc, Mutex};

use iommu_bounce::Engine;
use iommu_bounce::spec::{config, feature};
use log::debug;
use virtio_queue::Queue;
use vm_memory::GuestMemoryMmap;

use super::events::{EVENT_QUEUE, deliver};
use super::requests::RequestQueue;
use crate::sync::lock;
use crate::virtio::windows::WindowMemory;
use crate::virtio::{Activation, DeviceError, Interrupt, SharedRegion, VirtioDevice};

/// Device type (virtio 1.3, section 5).
const DEVICE_TYPE: u16 = 23;
/// PCI class: base system peripheral, other.
const PCI_CLASS: u32 = 0x08_8000;
/// The `shmid` of the region that windows appear in.
const WINDOW_SHMID: u8 = 0;

/// Index of the request queue.
pub(super) const REQUEST_QUEUE: u16 = 0;
/// Largest sizes of the request and the event queue.
const QUEUE_SIZES: [u16; 2] = [256, 64];

/// What a driver has set up.
struct Active {
    memory: Arc<GuestMemoryMmap>,
    requests: Option<RequestQueue>,
    events: Option<Queue>,
    interrupt: Arc<dyn Interrupt>,
}

/// A virtio-iommu device in front of an engine.
///
/// Requests are served on the thread of the vCPU that notified: Linux's driver spins with interrupts off until the
/// answer is there, so any other thread would only add its wake-up to the wait. Faults are handed over on whatever thread
/// reports them, and when the driver gives buffers for them.
///
/// `INDIRECT_DESC` is not offered, since with it a Linux driver allocates memory for every request. Neither is `EVENT_IDX`,
/// which would save nothing here: the driver wants no interrupts from the request queue and says so by a flag, and a
/// notification is what a request waits for. Without it a driver notifies of everything that it puts in the queue, on
/// which the bound of a batch relies.
pub struct VirtioIommu {
    engine: Arc<Mutex<Engine>>,
    windows: Option<Arc<WindowMemory>>,
    features: u64,
    config_len: usize,
    active: Mutex<Option<Active>>,
}

impl VirtioIommu {
    /// A device in front of `engine`; `windows` owns the memory of the engine's chunk store, if it has one.
    pub fn new(engine: Arc<Mutex<Engine>>, windows: Option<Arc<WindowMemory>>) -> Self {
        let (features, config_len) = {
            let engine = lock(&engine);
            (engine.features(), engine.config_len())
        };
        Self { engine, windows, features, config_len, active: Mutex::new(None) }
    }
}

impl VirtioDevice for VirtioIommu {
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
        &QUEUE_SIZES
    }

    fn config_len(&self) -> usize {
        self.config_len
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        let space = lock(&self.engine).config_space();
        for (value, byte) in data.iter_mut().zip(space.iter().take(self.config_len).skip(offset)) {
            *value = *byte;
        }
    }

    /// Only `bypass` is writable.
    fn write_config(&self, offset: usize, data: &[u8]) {
        if let Some(value) = config::BYPASS.checked_sub(offset).and_then(|at| data.get(at)) {
            lock(&self.engine).write_bypass(*value);
        }
    }

    fn activate(&self, activation: Activation) {
        lock(&self.engine).accept_features(activation.features);
        if let Some(windows) = &self.windows {
            windows.set_in_use(activation.features & feature::BOUNCE_WINDOW != 0);
        }
        let Activation { memory, queues, interrupt, .. } = activation;
        let mut queues = queues.into_iter();
        let (requests, events) = (queues.next().flatten().map(RequestQueue::new), queues.next().flatten());
        *lock(&self.active) = Some(Active { memory, requests, events, interrupt });
    }

    fn notify(&self, queue: u16) -> Result<(), DeviceError> {
        let mut active = lock(&self.active);
        let Some(Active { memory, requests, events, interrupt }) = active.as_mut() else { return Ok(()) };
        let mut engine = lock(&self.engine);
        if let (REQUEST_QUEUE, Some(requests)) = (queue, requests)
            && requests.serve(memory, &mut engine)?
        {
            interrupt.queue_used(REQUEST_QUEUE);
        }
        // A request may have brought one about.
        if let Some(events) = events
            && engine.has_faults()
            && deliver(events, memory, &mut engine)?
        {
            interrupt.queue_used(EVENT_QUEUE);
        }
        Ok(())
    }

    fn reset(&self) {
        self.stop(Engine::reset);
    }

    fn system_reset(&self) {
        self.stop(Engine::system_reset);
    }

    fn shared_region(&self) -> Option<SharedRegion> {
        self.windows.as_ref().map(|windows| SharedRegion { id: WINDOW_SHMID, size: windows.region_size() })
    }

    fn shared_region_moved(&self, address: u64) -> io::Result<()> {
        self.windows.as_ref().map_or(Ok(()), |windows| windows.moved(address))
    }
}

impl VirtioIommu {
    /// Hands faults that were reported to the driver, as far as it has given buffers.
    pub(super) fn hand_over_faults(&self) {
        let mut active = lock(&self.active);
        let mut engine = lock(&self.engine);
        if let Some(Active { memory, events: Some(events), interrupt, .. }) = active.as_mut() {
            match deliver(events, memory, &mut engine) {
                Ok(true) => interrupt.queue_used(EVENT_QUEUE),
                Ok(false) => {}
                // The next notification fails for the same reason, and tells the driver.
                Err(error) => debug!("{error}"),
            }
        }
    }

    /// Lets go of the queues, and resets the engine.
    fn stop(&self, reset: fn(&mut Engine)) {
        *lock(&self.active) = None;
        reset(&mut lock(&self.engine));
        if let Some(windows) = &self.windows {
            windows.set_in_use(false);
        }
    }
}

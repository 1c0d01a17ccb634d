// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! virtio-iommu device: its queues and configuration (virtio 1.3, section 5.13).

use std::io;
use std::sync::{Arc, Mutex};

use iommu_bounce::spec::{config, feature};
use iommu_bounce::{Engine, Histogram};
use virtio_bindings::bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use virtio_queue::Queue;

use super::poller::Poller;
use super::queues::Queues;
use super::{RingFeatures, state};
use crate::state::{DeviceState, StateError};
use crate::sync::lock;
use crate::virtio::device::read_bytes;
use crate::virtio::{DeviceError, DeviceProperties, Driver, QueueState, SharedRegion, VirtioDevice};
use crate::windows::WindowMemory;

/// Device type (virtio 1.3, section 5).
const DEVICE_TYPE: u16 = 23;
/// PCI class: base system peripheral, other.
const PCI_CLASS: u32 = 0x08_8000;
/// `shmid` of the shared memory region that contains the windows.
const WINDOW_SHMID: u8 = 0;

/// Maximum sizes of the request queue and the event queue.
const QUEUE_SIZES: [u16; 2] = [256, 64];

/// virtio-iommu device with its engine.
///
/// The thread of the vCPU that notifies the device serves the requests. Linux's driver spins with interrupts off until the answer arrives.
/// The wake-up of another thread would only lengthen this wait. When requests arrive fast, a polling thread serves them without
/// notifications ([`poller`](super::poller)). The thread that reports a fault also delivers the fault. If the event queue has no buffer,
/// the fault is delivered when the driver adds a buffer.
///
/// The number of requests that one notification serves is bounded. Further requests wait for their own notification, or for the polling
/// thread. See [`ask_for_notifications`](crate::virtio::notification::ask_for_notifications).
pub struct VirtioIommu {
    /// The poller is the first field, so that its thread has ended before the queues are dropped. Otherwise the thread could be the last
    /// owner of the engine, and would drop the engine. The thread's sandbox forbids system calls that are needed to drop the engine.
    poller: Poller,
    queues: Arc<Queues>,
    windows: Option<Arc<WindowMemory>>,
    features: u64,
    config_len: usize,
}

impl VirtioIommu {
    /// Creates a device with this engine. `windows` owns the memory of the engine's chunk store, if the engine has one. `poll` is true if a
    /// thread may poll for requests.
    ///
    /// # Errors
    /// The host cannot start the polling thread.
    pub fn new(
        engine: Arc<Mutex<Engine>>,
        windows: Option<Arc<WindowMemory>>,
        rings: RingFeatures,
        poll: bool,
    ) -> io::Result<Self> {
        let (mut features, config_len) = {
            let engine = lock(&engine);
            (engine.features(), engine.config_len())
        };
        for (offered, bit) in
            [(rings.indirect_desc, VIRTIO_RING_F_INDIRECT_DESC), (rings.event_idx, VIRTIO_RING_F_EVENT_IDX)]
        {
            features |= u64::from(offered) << bit;
        }
        let queues = Arc::new(Queues::new(engine));
        let poller = Poller::spawn(queues.clone(), poll)?;
        Ok(Self { poller, queues, windows, features, config_len })
    }
}

impl VirtioIommu {
    /// Allows or forbids polling.
    pub(super) fn allow_polling(&self, allowed: bool) {
        self.poller.allow(allowed);
    }
}

impl VirtioDevice for VirtioIommu {
    fn properties(&self) -> DeviceProperties<'_> {
        DeviceProperties::new(DEVICE_TYPE, PCI_CLASS, self.features, &QUEUE_SIZES, self.config_len)
    }

    fn read_config(&self, offset: usize, data: &mut [u8]) {
        let space = lock(self.queues.engine()).config_space();
        read_bytes(&space[..self.config_len], offset, data);
    }

    /// Writes the device configuration. Only `bypass` is writable.
    fn write_config(&self, offset: usize, data: &[u8]) {
        if let Some(value) = config::BYPASS.checked_sub(offset).and_then(|at| data.get(at)) {
            lock(self.queues.engine()).write_bypass(*value);
        }
    }

    fn activate(&self, driver: Driver) {
        lock(self.queues.engine()).accept_features(driver.features);
        if let Some(windows) = &self.windows {
            windows.set_in_use(driver.features & feature::ANY_BOUNCE_WINDOW != 0);
        }
        self.queues.open(&driver);
    }

    fn start_queue(&self, index: u16, queue: Queue) -> io::Result<()> {
        self.queues.start(index, queue);
        Ok(())
    }

    fn stop_queue(&self, index: u16) -> Option<QueueState> {
        self.queues.stop(index)
    }

    fn queue_state(&self, index: u16) -> Option<QueueState> {
        self.queues.state(index)
    }

    fn notify(&self, queue: u16) -> Result<(), DeviceError> {
        let polling_pays = self.queues.notified(queue)?;
        if polling_pays {
            self.poller.wake();
        }
        Ok(())
    }

    fn reset(&self) {
        self.stop(Engine::reset);
    }

    fn system_reset(&self) {
        self.stop(Engine::system_reset);
    }

    fn pause(&self) {
        self.queues.pause();
    }

    fn resume(&self) {
        if self.queues.resume() {
            self.poller.serve();
        }
    }

    fn vm_resumed(&self) {
        lock(self.queues.engine()).catch_up();
    }

    fn save(&self) -> Result<DeviceState, StateError> {
        state::save(&lock(self.queues.engine()))
    }

    /// Restores the state. The device is paused afterwards, like every restored device.
    fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
        self.queues.pause();
        state::restore(&mut lock(self.queues.engine()), self.windows.as_deref(), state)
    }

    fn shared_region(&self) -> Option<SharedRegion> {
        self.windows.as_ref().map(|windows| SharedRegion { id: WINDOW_SHMID, size: windows.region_size() })
    }

    fn shared_region_moved(&self, address: u64) -> io::Result<()> {
        self.windows.as_ref().map_or(Ok(()), |windows| windows.moved(address))
    }
}

impl VirtioIommu {
    /// Returns the histogram of stalls. A stall is the time that a request waited because the polling thread had no CPU.
    pub(super) fn poll_stalls(&self) -> Histogram {
        self.queues.stalls()
    }

    /// Returns the histogram of stalls. Returns `None` if another thread holds the lock on the histogram for more than a few microseconds.
    pub(super) fn poll_stalls_soon(&self) -> Option<Histogram> {
        self.queues.stalls_soon()
    }

    /// Delivers pending faults to the driver, while the event queue has buffers for the faults.
    pub(super) fn hand_over_faults(&self) {
        self.queues.hand_over_faults();
    }

    /// Drops the queues, and resets the engine with `reset`.
    fn stop(&self, reset: fn(&mut Engine)) {
        self.queues.close();
        reset(&mut lock(self.queues.engine()));
        if let Some(windows) = &self.windows {
            windows.set_in_use(false);
        }
    }
}

#[cfg(test)]
impl VirtioIommu {
    /// Returns the queues of the active driver.
    pub(super) fn queues(&self) -> &Queues {
        &self.queues
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use iommu_bounce::test_utils::TestRam;
    use iommu_bounce::{DmaMapper, EngineConfig, MapError, MapperLimits, Permissions, UnmapError};
    use vm_memory::VolatileSlice;

    use super::*;
    use crate::drop_reporter::DropReporter;

    impl DmaMapper for DropReporter {
        fn map(&mut self, _: u64, _: VolatileSlice<'_>, _: Permissions) -> Result<(), MapError> {
            Ok(())
        }
        fn unmap(&mut self, _: u64, _: u64) -> Result<(), UnmapError> {
            Ok(())
        }
        fn limits(&self) -> MapperLimits {
            MapperLimits { page_size_mask: !0xfff, iova_ranges: vec![0..=u64::from(u32::MAX)], max_mappings: None }
        }
        fn keeps_page_tables(&self) -> bool {
            false
        }
    }

    #[test]
    fn polling_thread_never_drops_the_engine() {
        let (reporter, dropped) = DropReporter::new();
        let ram = Arc::new(TestRam::new(&[(0, 1 << 20)]));
        let mut engine = Engine::new(EngineConfig::default(), ram, None).unwrap();
        engine.add_endpoint(1, Box::new(reporter)).unwrap();
        drop(VirtioIommu::new(Arc::new(Mutex::new(engine)), None, RingFeatures::default(), true).unwrap());
        assert_eq!(dropped.recv(), Ok(thread::current().id()));
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Device that records the calls of the transport.

use std::collections::BTreeMap;
use std::sync::Mutex;

use virtio_queue::Queue;

use super::FEATURE;
use crate::state::{DeviceState, StateError};
use crate::sync::lock;
use crate::virtio::device::read_bytes;
use crate::virtio::{DeviceError, DeviceProperties, Driver, QueueState, SharedRegion, VirtioDevice};

#[derive(Default)]
pub(super) struct Recorder {
    pub(super) activations: Mutex<Vec<Driver>>,
    pub(super) queues: Mutex<BTreeMap<u16, Queue>>,
    pub(super) notified: Mutex<Vec<u16>>,
    pub(super) config: Mutex<[u8; 8]>,
    pub(super) moved: Mutex<Vec<u64>>,
    pub(super) resets: Mutex<u32>,
    /// Calls of `pause` (true) and `resume` (false).
    pub(super) pauses: Mutex<Vec<bool>>,
    pub(super) vm_resumes: Mutex<u32>,
    pub(super) fail: Mutex<bool>,
    pub(super) shared: Option<SharedRegion>,
}

impl VirtioDevice for Recorder {
    fn properties(&self) -> DeviceProperties<'_> {
        DeviceProperties::new(23, 0x08_8000, FEATURE, &[16, 8], 8)
    }
    fn read_config(&self, offset: usize, data: &mut [u8]) {
        read_bytes(&*lock(&self.config), offset, data);
    }
    fn write_config(&self, offset: usize, data: &[u8]) {
        for (byte, value) in lock(&self.config).iter_mut().skip(offset).zip(data) {
            *byte = *value;
        }
    }
    fn activate(&self, driver: Driver) {
        lock(&self.activations).push(driver);
    }
    fn start_queue(&self, index: u16, queue: Queue) -> std::io::Result<()> {
        assert!(lock(&self.queues).insert(index, queue).is_none());
        Ok(())
    }
    fn stop_queue(&self, index: u16) -> Option<QueueState> {
        lock(&self.queues).remove(&index).map(|queue| QueueState::of(&queue))
    }
    fn queue_state(&self, index: u16) -> Option<QueueState> {
        lock(&self.queues).get(&index).map(QueueState::of)
    }
    fn pause(&self) {
        lock(&self.pauses).push(true);
    }
    fn resume(&self) {
        lock(&self.pauses).push(false);
    }
    fn vm_resumed(&self) {
        *lock(&self.vm_resumes) += 1;
    }
    fn save(&self) -> Result<DeviceState, StateError> {
        DeviceState::new("recorder", 1, &())
    }
    fn restore(&self, state: &DeviceState) -> Result<(), StateError> {
        state.payload("recorder", 1)
    }
    fn notify(&self, queue: u16) -> Result<(), DeviceError> {
        lock(&self.notified).push(queue);
        if *lock(&self.fail) { Err(DeviceError::Queue { queue, rule: "test" }) } else { Ok(()) }
    }
    fn reset(&self) {
        *lock(&self.resets) += 1;
    }
    fn shared_region(&self) -> Option<SharedRegion> {
        self.shared
    }
    fn shared_region_moved(&self, address: u64) -> std::io::Result<()> {
        lock(&self.moved).push(address);
        Ok(())
    }
}

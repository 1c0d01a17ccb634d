// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The common configuration structure and the device status (virtio 1.3, sections 2.1 and 4.1.4.3).

use serde::{Deserialize, Serialize};
use virtio_queue::{Queue, QueueT};
use vm_memory::GuestAddress;

use super::interrupts::Interrupts;
use super::layout::COMMON_SIZE;
use crate::dma::DmaView;
use crate::state::StateError;
use crate::virtio::QueueState;

/// `VIRTIO_F_RING_EVENT_IDX` (virtio 1.3, section 6).
const EVENT_IDX: u64 = 1 << 29;
/// `VIRTIO_F_VERSION_1` (virtio 1.3, section 6). A driver that does not accept this feature is a legacy driver.
const VERSION_1: u64 = 1 << 32;
/// `VIRTIO_F_ACCESS_PLATFORM` (virtio 1.3, section 6). The platform's IOMMU translates the device's addresses.
const ACCESS_PLATFORM: u64 = 1 << 33;

/// Bits of the device status (virtio 1.3, section 2.1).
pub(super) mod status {
    /// The driver has accepted its features.
    pub(in super::super) const FEATURES_OK: u8 = 8;
    /// The driver is ready.
    pub(in super::super) const DRIVER_OK: u8 = 4;
    /// The device has failed and needs a reset.
    pub(in super::super) const NEEDS_RESET: u8 = 64;
    /// All defined bits: the bits above, `ACKNOWLEDGE`, `DRIVER` and `FAILED`.
    pub(in super::super) const ALL: u8 = 1 | 2 | DRIVER_OK | FEATURES_OK | NEEDS_RESET | 128;
}

/// Offsets of the registers (virtio 1.3, section 4.1.4.3).
mod reg {
    pub(super) const DEVICE_FEATURE_SELECT: u64 = 0;
    pub(super) const DEVICE_FEATURE: usize = 4;
    pub(super) const DRIVER_FEATURE_SELECT: u64 = 8;
    pub(super) const DRIVER_FEATURE: u64 = 12;
    pub(super) const CONFIG_VECTOR: u64 = 16;
    pub(super) const NUM_QUEUES: usize = 18;
    pub(super) const STATUS: u64 = 20;
    pub(super) const GENERATION: usize = 21;
    pub(super) const QUEUE_SELECT: u64 = 22;
    pub(super) const QUEUE_SIZE: u64 = 24;
    pub(super) const QUEUE_VECTOR: u64 = 26;
    pub(super) const QUEUE_ENABLE: u64 = 28;
    pub(super) const QUEUE_NOTIFY_OFF: usize = 30;
    pub(super) const QUEUE_DESC: u64 = 32;
    pub(super) const QUEUE_DEVICE_END: u64 = 56;
}

/// Action that the transport must take after a register write of the driver.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// No action.
    None,
    /// Reset the device.
    Reset,
    /// Start the device: the driver has set `DRIVER_OK`.
    Start,
}

/// Registers of one queue.
#[derive(Clone, Copy)]
struct QueueSetup {
    max_size: u16,
    size: u16,
    enabled: bool,
    /// Addresses of the descriptor table, available ring and used ring, as the device sees them.
    rings: [u64; 3],
}

impl QueueSetup {
    fn new(max_size: u16) -> Self {
        Self { max_size, size: max_size, enabled: false, rings: [0; 3] }
    }
}

/// Saved registers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct CommonState {
    device_select: u32,
    driver_select: u32,
    driver_features: u64,
    status: u8,
    queue_select: u16,
    pub(super) queues: Vec<QueueSetupState>,
}

/// Saved registers of a queue, and the position up to which the queue was served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct QueueSetupState {
    size: u16,
    enabled: bool,
    descriptors: u64,
    available: u64,
    used: u64,
    pub(super) served: Option<QueueState>,
}

/// Registers of the common configuration structure.
pub(super) struct CommonConfig {
    offered: u64,
    /// Offered features that a driver must accept.
    needed: u64,
    device_select: u32,
    driver_select: u32,
    driver_features: u64,
    status: u8,
    queue_select: u16,
    queues: Vec<QueueSetup>,
}

impl CommonConfig {
    /// Returns the registers of a device that offers `features` in addition to the transport's features. `translated` is true if the device
    /// is behind an IOMMU. The driver must then accept `ACCESS_PLATFORM`.
    pub(super) fn new(features: u64, translated: bool, queue_sizes: &[u16]) -> Self {
        let needed = VERSION_1 | if translated { ACCESS_PLATFORM } else { 0 };
        Self {
            offered: features | needed,
            needed,
            device_select: 0,
            driver_select: 0,
            driver_features: 0,
            status: 0,
            queue_select: 0,
            queues: queue_sizes.iter().map(|size| QueueSetup::new(*size)).collect(),
        }
    }

    /// Returns the device status.
    pub(super) fn status(&self) -> u8 {
        self.status
    }

    /// Returns the negotiated features.
    pub(super) fn features(&self) -> u64 {
        self.driver_features
    }

    /// Sets `NEEDS_RESET`. The bit stays set until a reset.
    pub(super) fn set_needs_reset(&mut self) {
        self.status |= status::NEEDS_RESET;
    }

    /// Returns the registers' state. `served` returns the position up to which a queue was served, or `None` if the queue was not started.
    pub(super) fn state(&self, served: impl Fn(u16) -> Option<QueueState>) -> CommonState {
        let queues = (0..).zip(&self.queues).map(|(index, queue)| QueueSetupState {
            size: queue.size,
            enabled: queue.enabled,
            descriptors: queue.rings[0],
            available: queue.rings[1],
            used: queue.rings[2],
            served: served(index),
        });
        CommonState {
            device_select: self.device_select,
            driver_select: self.driver_select,
            driver_features: self.driver_features,
            status: self.status,
            queue_select: self.queue_select,
            queues: queues.collect(),
        }
    }

    /// Restores `state` in registers that are new or were just reset. Rejects a state that no driver can reach.
    pub(super) fn restore(&mut self, state: &CommonState) -> Result<(), StateError> {
        if state.queues.len() != self.queues.len() {
            return Err(StateError::rule(
                "queues",
                format!(
                    "the saved state must have {} queues: restore with the configuration that was saved",
                    self.queues.len()
                ),
            ));
        }
        let (accepted, running) = (state.status & status::FEATURES_OK != 0, state.status & status::DRIVER_OK != 0);
        if state.status & !status::ALL != 0 || running && !accepted {
            return Err(StateError::rule(
                "status",
                format!("no driver can set the saved status {:#x}: restore from an unmodified snapshot", state.status),
            ));
        }
        if accepted && !self.features_fit(state.driver_features) {
            let rule = format!(
                "the saved features {:#x} must include all required features {:#x}, and no features other than the offered features {:#x}: restore with the configuration that was saved, on a host that supports the features",
                state.driver_features, self.needed, self.offered
            );
            return Err(StateError::rule("driver_features", rule));
        }
        for (index, (queue, setup)) in state.queues.iter().zip(&self.queues).enumerate() {
            let rule = |rule: &str| Err(StateError::rule(format!("queues[{index}]"), rule));
            if !queue.size.is_power_of_two() || queue.size > setup.max_size {
                return rule(
                    "the saved queue size must be a power of two, and at most the maximum size of the queue: restore with the configuration that was saved",
                );
            }
            if queue.enabled && !accepted || queue.served.is_some() && !(queue.enabled && running) {
                return rule(
                    "a saved queue can be enabled only if the saved status has FEATURES_OK, and can be served only if the queue is enabled and the status has DRIVER_OK: restore from an unmodified snapshot",
                );
            }
        }
        (self.device_select, self.driver_select) = (state.device_select, state.driver_select);
        (self.driver_features, self.status) = (state.driver_features, state.status);
        self.queue_select = state.queue_select;
        for (queue, setup) in state.queues.iter().zip(&mut self.queues) {
            (setup.size, setup.enabled) = (queue.size, queue.enabled);
            setup.rings = [queue.descriptors, queue.available, queue.used];
        }
        Ok(())
    }

    /// Resets all registers.
    pub(super) fn reset(&mut self) {
        self.device_select = 0;
        self.driver_select = 0;
        self.driver_features = 0;
        self.status = 0;
        self.queue_select = 0;
        for queue in &mut self.queues {
            *queue = QueueSetup::new(queue.max_size);
        }
    }

    /// Reads at `offset`. Bytes beyond the end of the structure read as zero.
    pub(super) fn read(&self, offset: u64, data: &mut [u8], interrupts: &Interrupts) {
        let bytes = self.render(interrupts);
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        data.fill(0);
        for (value, byte) in data.iter_mut().zip(bytes.iter().skip(start)) {
            *value = *byte;
        }
    }

    /// Writes at `offset`. A write takes effect only if it covers exactly one register. A 64-bit register may also be written in halves
    /// (virtio 1.3, section 4.1.3.1).
    pub(super) fn write(&mut self, offset: u64, data: &[u8], interrupts: &Interrupts) -> Action {
        match *data {
            [value] if offset == reg::STATUS => return self.write_status(value),
            [a, b] => self.write_word(offset, u16::from_le_bytes([a, b]), interrupts),
            [a, b, c, d] => self.write_dword(offset, u32::from_le_bytes([a, b, c, d])),
            [a, b, c, d, e, f, g, h] if (reg::QUEUE_DESC..reg::QUEUE_DEVICE_END).contains(&offset) => {
                self.write_dword(offset, u32::from_le_bytes([a, b, c, d]));
                self.write_dword(offset + 4, u32::from_le_bytes([e, f, g, h]));
            }
            _ => {}
        }
        Action::None
    }

    /// Returns the queues as the driver has set them up. The entry of a queue that is not enabled is `None`. Returns `None` if the rings of
    /// at least one queue are misaligned or outside the device's memory.
    pub(super) fn build_queues(&self, memory: &DmaView<'_>) -> Option<Vec<Option<Queue>>> {
        self.queues.iter().map(|setup| self.build_queue(setup, memory)).collect()
    }

    fn build_queue(&self, setup: &QueueSetup, memory: &DmaView<'_>) -> Option<Option<Queue>> {
        if !setup.enabled {
            return Some(None);
        }
        let [descriptors, available, used] = setup.rings.map(GuestAddress);
        let mut queue = Queue::new(setup.max_size).ok()?;
        queue.try_set_size(setup.size).ok()?;
        queue.try_set_desc_table_address(descriptors).ok()?;
        queue.try_set_avail_ring_address(available).ok()?;
        queue.try_set_used_ring_address(used).ok()?;
        queue.set_event_idx(self.driver_features & EVENT_IDX != 0);
        queue.set_ready(true);
        // Reject an available ring at address 0, because virtio-queue treats a queue with such a ring as never set up.
        (setup.rings[1] != 0 && queue.is_valid(memory)).then_some(Some(queue))
    }

    fn render(&self, interrupts: &Interrupts) -> [u8; COMMON_SIZE] {
        let mut bytes = [0; COMMON_SIZE];
        let mut put = |offset: usize, value: &[u8]| bytes[offset..offset + value.len()].copy_from_slice(value);
        put(at(reg::DEVICE_FEATURE_SELECT), &self.device_select.to_le_bytes());
        put(reg::DEVICE_FEATURE, &half(self.offered, self.device_select).to_le_bytes());
        put(at(reg::DRIVER_FEATURE_SELECT), &self.driver_select.to_le_bytes());
        put(at(reg::DRIVER_FEATURE), &half(self.driver_features, self.driver_select).to_le_bytes());
        put(at(reg::CONFIG_VECTOR), &interrupts.config_vector().to_le_bytes());
        let count = u16::try_from(self.queues.len()).expect("checked when the device was created");
        put(reg::NUM_QUEUES, &count.to_le_bytes());
        put(at(reg::STATUS), &[self.status]);
        put(reg::GENERATION, &[interrupts.generation()]);
        put(at(reg::QUEUE_SELECT), &self.queue_select.to_le_bytes());
        // If the selected queue does not exist, the queue size register reads as 0.
        if let Some(queue) = self.queues.get(usize::from(self.queue_select)) {
            put(at(reg::QUEUE_SIZE), &queue.size.to_le_bytes());
            put(at(reg::QUEUE_VECTOR), &interrupts.queue_vector(self.queue_select).to_le_bytes());
            put(at(reg::QUEUE_ENABLE), &u16::from(queue.enabled).to_le_bytes());
            put(reg::QUEUE_NOTIFY_OFF, &self.queue_select.to_le_bytes());
            for (index, ring) in queue.rings.iter().enumerate() {
                put(at(reg::QUEUE_DESC) + 8 * index, &ring.to_le_bytes());
            }
        }
        bytes
    }

    fn write_status(&mut self, value: u8) -> Action {
        if value == 0 {
            return Action::Reset;
        }
        // Undefined bits are ignored, because `restore` rejects a state with such a bit.
        let mut added = value & status::ALL & !self.status & !status::NEEDS_RESET;
        if added & status::FEATURES_OK != 0 && !self.features_fit(self.driver_features) {
            added &= !status::FEATURES_OK;
        }
        // `DRIVER_OK` is illegal without `FEATURES_OK`. In this case, the bit is ignored and the device does not start.
        if (self.status | added) & status::FEATURES_OK == 0 {
            added &= !status::DRIVER_OK;
        }
        self.status |= added;
        let starts = added & status::DRIVER_OK != 0 && self.status & status::NEEDS_RESET == 0;
        if starts { Action::Start } else { Action::None }
    }

    /// True if the features `accepted` are legal. A driver may accept only offered features. A driver must accept `VERSION_1`, and also
    /// `ACCESS_PLATFORM` if the device is behind an IOMMU.
    fn features_fit(&self, accepted: u64) -> bool {
        accepted & !self.offered == 0 && accepted & self.needed == self.needed
    }

    fn write_word(&mut self, offset: u64, value: u16, interrupts: &Interrupts) {
        let started = self.status & status::DRIVER_OK != 0;
        let accepted = self.status & status::FEATURES_OK != 0;
        match offset {
            reg::CONFIG_VECTOR => interrupts.set_config_vector(value),
            reg::QUEUE_SELECT => self.queue_select = value,
            reg::QUEUE_VECTOR => interrupts.set_queue_vector(self.queue_select, value),
            _ => {}
        }
        let Some(queue) = self.queues.get_mut(usize::from(self.queue_select)) else { return };
        if started || queue.enabled {
            return;
        }
        match offset {
            reg::QUEUE_SIZE if value.is_power_of_two() && value <= queue.max_size => queue.size = value,
            reg::QUEUE_ENABLE if value == 1 && accepted => queue.enabled = true,
            _ => {}
        }
    }

    fn write_dword(&mut self, offset: u64, value: u32) {
        match offset {
            reg::DEVICE_FEATURE_SELECT => self.device_select = value,
            reg::DRIVER_FEATURE_SELECT => self.driver_select = value,
            reg::DRIVER_FEATURE if self.status & status::FEATURES_OK == 0 && self.driver_select < 2 => {
                let shift = 32 * self.driver_select;
                self.driver_features &= !(0xffff_ffff << shift);
                self.driver_features |= u64::from(value) << shift;
            }
            reg::QUEUE_DESC..reg::QUEUE_DEVICE_END if offset.is_multiple_of(4) => self.write_ring(offset, value),
            _ => {}
        }
    }

    fn write_ring(&mut self, offset: u64, value: u32) {
        let started = self.status & status::DRIVER_OK != 0;
        let Some(queue) = self.queues.get_mut(usize::from(self.queue_select)) else { return };
        if started || queue.enabled {
            return;
        }
        let place = offset - reg::QUEUE_DESC;
        let shift = if place.is_multiple_of(8) { 0 } else { 32 };
        if let Some(ring) = queue.rings.get_mut(at(place / 8)) {
            *ring = (*ring & !(0xffff_ffff << shift)) | (u64::from(value) << shift);
        }
    }
}

/// Converts a register's offset to an index.
fn at(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

/// Returns the half of `value` that a feature select register with the value `select` selects. The value 0 selects the low half, and 1
/// selects the high half. Returns 0 for any other value of `select`.
fn half(value: u64, select: u32) -> u32 {
    let bytes = value.to_le_bytes();
    match select {
        0 => u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        1 => u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]),
        _ => 0,
    }
}

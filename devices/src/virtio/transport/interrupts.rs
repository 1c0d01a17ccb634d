// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Interrupts of a virtio PCI device: MSI-X vectors, ISR status, configuration generation.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, Ordering};

use log::warn;
use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::EventFd;

use crate::pci::{MsixError, MsixState, MsixTable};
use crate::state::StateError;
use crate::sync::lock;

/// Vector number that means "no vector" (virtio 1.3, section 4.1.5.1.2).
pub(super) const NO_VECTOR: u16 = 0xffff;

/// ISR status: buffers were used (virtio 1.3, section 4.1.4.5).
const ISR_QUEUE: u8 = 1 << 0;
/// ISR status: the device configuration changed.
const ISR_CONFIG: u8 = 1 << 1;

/// Saved interrupt state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct InterruptsState {
    msix: MsixState,
    config_vector: u16,
    queue_vectors: Vec<u16>,
    isr: u8,
    generation: u8,
}

/// Interrupt state of one device.
pub(super) struct Interrupts {
    msix: Mutex<MsixTable>,
    vector_count: u16,
    config_vector: AtomicU16,
    queue_vectors: Vec<AtomicU16>,
    isr: AtomicU8,
    generation: AtomicU8,
    /// True if the driver has set `DRIVER_OK`. Before this time, the device must not send notifications (virtio 1.3, section 2.1.2).
    running: AtomicBool,
    /// True if a failure of the platform was logged already.
    complained: AtomicBool,
}

impl Interrupts {
    /// Returns the interrupts of a device with `queues` queues. No vector is assigned yet.
    pub(super) fn new(msix: MsixTable, queues: usize) -> Self {
        Self {
            vector_count: msix.count(),
            msix: Mutex::new(msix),
            config_vector: AtomicU16::new(NO_VECTOR),
            queue_vectors: (0..queues).map(|_| AtomicU16::new(NO_VECTOR)).collect(),
            isr: AtomicU8::new(0),
            generation: AtomicU8::new(0),
            running: AtomicBool::new(false),
            complained: AtomicBool::new(false),
        }
    }

    /// Calls `change` with the MSI-X table. If the platform rejects the change, this function only logs the error, because the guest cannot
    /// handle the error.
    pub(super) fn with_msix(&self, change: impl FnOnce(&mut MsixTable) -> Result<(), MsixError>) {
        if let Err(error) = change(&mut lock(&self.msix)) {
            self.complain(&error);
        }
    }

    /// Returns the vector of configuration changes.
    pub(super) fn config_vector(&self) -> u16 {
        self.config_vector.load(Ordering::Relaxed)
    }

    /// Sets the vector of configuration changes. If the vector does not exist, sets [`NO_VECTOR`].
    pub(super) fn set_config_vector(&self, vector: u16) {
        self.config_vector.store(self.existing(vector), Ordering::Relaxed);
    }

    /// Returns the vector of a queue.
    pub(super) fn queue_vector(&self, queue: u16) -> u16 {
        self.queue_vectors.get(usize::from(queue)).map_or(NO_VECTOR, |vector| vector.load(Ordering::Relaxed))
    }

    /// Sets the vector of a queue. If the vector does not exist, sets [`NO_VECTOR`].
    pub(super) fn set_queue_vector(&self, queue: u16, vector: u16) {
        if let Some(place) = self.queue_vectors.get(usize::from(queue)) {
            place.store(self.existing(vector), Ordering::Relaxed);
        }
    }

    /// Reads and clears the ISR status.
    pub(super) fn take_isr(&self) -> u8 {
        self.isr.swap(0, Ordering::AcqRel)
    }

    /// Returns the generation of the device configuration.
    pub(super) fn generation(&self) -> u8 {
        self.generation.load(Ordering::Acquire)
    }

    /// Allows or forbids notifications to the driver.
    pub(super) fn set_running(&self, running: bool) {
        self.running.store(running, Ordering::Release);
    }

    /// Resets the virtio registers: removes all vectors and clears the ISR status. The MSI-X table belongs to PCI and does not change.
    pub(super) fn reset(&self) {
        self.set_running(false);
        self.set_config_vector(NO_VECTOR);
        for vector in &self.queue_vectors {
            vector.store(NO_VECTOR, Ordering::Relaxed);
        }
        self.isr.store(0, Ordering::Release);
    }

    /// Returns the state to save. The state does not contain `running`.
    pub(super) fn state(&self) -> InterruptsState {
        InterruptsState {
            msix: lock(&self.msix).state(),
            config_vector: self.config_vector(),
            queue_vectors: self.queue_vectors.iter().map(|vector| vector.load(Ordering::Relaxed)).collect(),
            isr: self.isr.load(Ordering::Acquire),
            generation: self.generation(),
        }
    }

    /// Restores `state`. See [`MsixTable::restore`].
    pub(super) fn restore(&self, state: &InterruptsState) -> Result<(), StateError> {
        if state.queue_vectors.len() != self.queue_vectors.len() {
            return Err(StateError::rule(
                "queue_vectors",
                format!(
                    "the saved state must have {} queue vectors: restore with the configuration that was saved",
                    self.queue_vectors.len()
                ),
            ));
        }
        let mut vectors = state.queue_vectors.iter().chain([&state.config_vector]);
        if let Some(vector) = vectors.find(|vector| self.existing(**vector) != **vector) {
            return Err(StateError::rule(
                "queue_vectors, config_vector",
                format!(
                    "the saved vector {vector} does not exist in this device: restore with the configuration that was saved"
                ),
            ));
        }
        if state.isr & !(ISR_QUEUE | ISR_CONFIG) != 0 {
            return Err(StateError::rule(
                "isr",
                format!(
                    "the saved ISR status {:#x} has undefined bits: restore from an unmodified snapshot",
                    state.isr
                ),
            ));
        }
        lock(&self.msix).restore(&state.msix)?;
        self.config_vector.store(state.config_vector, Ordering::Relaxed);
        for (place, vector) in self.queue_vectors.iter().zip(&state.queue_vectors) {
            place.store(*vector, Ordering::Relaxed);
        }
        self.isr.store(state.isr, Ordering::Release);
        self.generation.store(state.generation, Ordering::Release);
        Ok(())
    }

    fn existing(&self, vector: u16) -> u16 {
        if vector < self.vector_count { vector } else { NO_VECTOR }
    }

    /// Sends the message of `vector`. If MSI-X is off, sets `isr_bit` in the ISR status instead. The device has no INTx, so a driver
    /// without MSI-X must poll the status (virtio 1.3, section 4.1.5.3.1).
    fn raise(&self, vector: u16, isr_bit: u8) {
        let mut msix = lock(&self.msix);
        if !msix.is_enabled() {
            self.isr.fetch_or(isr_bit, Ordering::AcqRel);
        } else if vector != NO_VECTOR
            && let Err(error) = msix.trigger(vector)
        {
            self.complain(&error);
        }
    }

    /// Notifies the driver that the device has used buffers of `queue`.
    pub(super) fn queue_used(&self, queue: u16) {
        if self.running.load(Ordering::Acquire) {
            self.raise(self.queue_vector(queue), ISR_QUEUE);
        }
    }

    /// Returns the eventfd of the vector of `queue`. If the vector is masked, a write to the eventfd makes the interrupt pending. Returns
    /// `None` if MSI-X is off, or if the vector has no eventfd.
    pub(super) fn queue_event(&self, queue: u16) -> Option<EventFd> {
        let msix = lock(&self.msix);
        let event = msix.is_enabled().then(|| msix.vectors().event(self.queue_vector(queue))).flatten()?;
        event.try_clone().ok()
    }

    /// Increments the generation of the device configuration. If `notify` is true, notifies the driver.
    pub(super) fn config_changed(&self, notify: bool) {
        self.generation.fetch_add(1, Ordering::AcqRel);
        if notify && self.running.load(Ordering::Acquire) {
            // The bit must be set even if MSI-X is on (virtio 1.3, section 4.1.4.5.1).
            self.isr.fetch_or(ISR_CONFIG, Ordering::AcqRel);
            self.raise(self.config_vector(), ISR_CONFIG);
        }
    }

    fn complain(&self, error: &dyn std::error::Error) {
        if !self.complained.swap(true, Ordering::Relaxed) {
            warn!("interrupts of a virtio device may be lost: {error} (reported once for each device)");
        }
    }
}

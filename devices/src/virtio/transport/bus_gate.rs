// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! DMA and interrupts of a device end with its right to use the bus.
//!
//! The driver takes that right away by the command register's bus master bit, or by a power state other than D0. The device's
//! queues are paused then, and its MSI-X messages stay pending: a message is a write to memory too. Both go on when the right
//! comes back. A pause of the whole VM is a second, independent reason to stand still.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use super::interrupts::Interrupts;
use crate::sync::lock;
use crate::virtio::VirtioDevice;

/// Reasons for a device to stand still.
struct Reasons {
    /// The function may use the bus.
    on_bus: bool,
    /// The VM is paused.
    vm_paused: bool,
}

impl Reasons {
    fn stands_still(&self) -> bool {
        !self.on_bus || self.vm_paused
    }
}

/// Gate between a device and the bus.
pub(super) struct BusGate {
    reasons: Mutex<Reasons>,
    /// Copy of `on_bus`, for notifications.
    is_open: AtomicBool,
}

impl BusGate {
    /// Returns a closed gate, as at power-on, of a device without a driver.
    pub(super) fn closed(device: &dyn VirtioDevice, interrupts: &Interrupts) -> Self {
        device.pause();
        interrupts.with_msix(|msix| msix.set_on_bus(false));
        Self { reasons: Mutex::new(Reasons { on_bus: false, vm_paused: false }), is_open: AtomicBool::new(false) }
    }

    /// True if the function may use the bus.
    pub(super) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Acquire)
    }

    /// Follows the registers. `may_use_bus` reads them with the gate locked, so that the last of several writes counts.
    ///
    /// When this returns with a closed gate, the device's I/O under way has ended and no DMA or message follows.
    pub(super) fn follow(
        &self,
        device: &dyn VirtioDevice,
        interrupts: &Interrupts,
        may_use_bus: impl FnOnce() -> bool,
    ) {
        let mut reasons = lock(&self.reasons);
        let open = may_use_bus();
        if reasons.on_bus == open {
            return;
        }
        let stood_still = reasons.stands_still();
        reasons.on_bus = open;
        self.is_open.store(open, Ordering::Release);
        if open {
            interrupts.with_msix(|msix| msix.set_on_bus(true));
        }
        set(device, stood_still, reasons.stands_still());
        if !open {
            // After the pause: interrupts of the I/O that ended with it are sent.
            interrupts.with_msix(|msix| msix.set_on_bus(false));
        }
    }

    /// Pauses the device with its VM.
    pub(super) fn pause_vm(&self, device: &dyn VirtioDevice) {
        self.set_vm_paused(device, true);
    }

    /// Resumes the device with its VM, if it may use the bus.
    pub(super) fn resume_vm(&self, device: &dyn VirtioDevice) {
        self.set_vm_paused(device, false);
        device.vm_resumed();
    }

    fn set_vm_paused(&self, device: &dyn VirtioDevice, paused: bool) {
        let mut reasons = lock(&self.reasons);
        let stood_still = reasons.stands_still();
        reasons.vm_paused = paused;
        set(device, stood_still, reasons.stands_still());
    }
}

/// Pauses or resumes the device if its state changes.
fn set(device: &dyn VirtioDevice, stood_still: bool, stands_still: bool) {
    match (stood_still, stands_still) {
        (false, true) => device.pause(),
        (true, false) => device.resume(),
        _ => {}
    }
}

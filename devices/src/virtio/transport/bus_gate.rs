// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Stops DMA and interrupts of a device while the driver forbids the device to use the bus.
//!
//! The driver forbids bus use if it clears the bus master bit of the command register, or selects a power state other than D0. The gate
//! then pauses the device's queues. The device's MSI-X messages stay pending, because each message is a memory write on the bus. When the
//! driver allows bus use again, the gate resumes the queues and sends the pending messages. A pause of the whole VM pauses the queues too,
//! independently of bus use.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use super::interrupts::Interrupts;
use crate::sync::lock;
use crate::virtio::VirtioDevice;

/// Reasons to pause a device.
struct Reasons {
    /// True if the function may use the bus.
    on_bus: bool,
    /// True if the VM is paused.
    vm_paused: bool,
}

impl Reasons {
    fn is_stopped(&self) -> bool {
        !self.on_bus || self.vm_paused
    }
}

/// Gate between a device and the bus.
pub(super) struct BusGate {
    reasons: Mutex<Reasons>,
    /// Copy of `on_bus`, which [`is_open`](Self::is_open) reads without the lock.
    is_open: AtomicBool,
}

impl BusGate {
    /// Returns a closed gate for a device without a driver, as at power-on.
    pub(super) fn closed(device: &dyn VirtioDevice, interrupts: &Interrupts) -> Self {
        device.pause();
        interrupts.with_msix(|msix| msix.set_on_bus(false));
        Self { reasons: Mutex::new(Reasons { on_bus: false, vm_paused: false }), is_open: AtomicBool::new(false) }
    }

    /// True if the function may use the bus.
    pub(super) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Acquire)
    }

    /// Opens or closes the gate according to the registers. `may_use_bus` reads the registers while the gate is locked. So after several
    /// concurrent writes, the gate follows the last write.
    ///
    /// If the gate is closed when this function returns, the device has no I/O in flight. Until the gate is opened again, the device starts
    /// no DMA and sends no messages.
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
        let was_stopped = reasons.is_stopped();
        reasons.on_bus = open;
        self.is_open.store(open, Ordering::Release);
        if open {
            interrupts.with_msix(|msix| msix.set_on_bus(true));
        }
        set(device, was_stopped, reasons.is_stopped());
        if !open {
            // Block the messages only after `set` has paused the device: I/O that completes while the device pauses must still send its
            // interrupts.
            interrupts.with_msix(|msix| msix.set_on_bus(false));
        }
    }

    /// Pauses the device because the VM is paused.
    pub(super) fn pause_vm(&self, device: &dyn VirtioDevice) {
        self.set_vm_paused(device, true);
    }

    /// Resumes the device because the VM is resumed, unless the driver forbids bus use.
    pub(super) fn resume_vm(&self, device: &dyn VirtioDevice) {
        self.set_vm_paused(device, false);
        device.vm_resumed();
    }

    fn set_vm_paused(&self, device: &dyn VirtioDevice, paused: bool) {
        let mut reasons = lock(&self.reasons);
        let was_stopped = reasons.is_stopped();
        reasons.vm_paused = paused;
        set(device, was_stopped, reasons.is_stopped());
    }
}

/// Pauses the device if it was running and must stop. Resumes the device if it was stopped and may run.
fn set(device: &dyn VirtioDevice, was_stopped: bool, is_stopped: bool) {
    match (was_stopped, is_stopped) {
        (false, true) => device.pause(),
        (true, false) => device.resume(),
        _ => {}
    }
}

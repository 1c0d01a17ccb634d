// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Level-triggered interrupt lines.

use std::io;
use std::sync::Arc;

use devices::platform::{InterruptLine, SharedLine};
use kvm_ioctls::{Cap, VmFd};
use vmm_sys_util::eventfd::EventFd;

/// Interrupt line of the I/O APIC.
pub struct KvmLine {
    vm: Arc<VmFd>,
    gsi: u32,
}

impl KvmLine {
    /// Creates line `gsi` of `vm`.
    pub fn new(vm: Arc<VmFd>, gsi: u32) -> Self {
        Self { vm, gsi }
    }
}

impl InterruptLine for KvmLine {
    fn set(&self, active: bool) -> io::Result<()> {
        Ok(self.vm.set_irq_line(self.gsi, active)?)
    }
}

/// Line of the I/O APIC that several host devices share. Each device raises the line with its own event (`KVM_IRQFD_FLAG_RESAMPLE`). KVM
/// keeps one state for all these events. An end of interrupt lowers the line. Then each device that still requests service raises the
/// line again.
pub struct KvmSharedLine {
    vm: Arc<VmFd>,
    irq: u8,
}

impl KvmSharedLine {
    /// Creates line `irq` of `vm`. Returns `None` if KVM does not report ends of interrupts.
    pub fn new(vm: Arc<VmFd>, irq: u32) -> Option<Self> {
        let irq = u8::try_from(irq).ok().filter(|_| vm.check_extension(Cap::IrqfdResample))?;
        Some(Self { vm, irq })
    }
}

impl SharedLine for KvmSharedLine {
    fn number(&self) -> u8 {
        self.irq
    }

    fn connect(&self, raise: &EventFd, served: &EventFd) -> io::Result<()> {
        Ok(self.vm.register_irqfd_with_resample(raise, served, self.irq.into())?)
    }

    fn disconnect(&self, raise: &EventFd) -> io::Result<()> {
        Ok(self.vm.unregister_irqfd(raise, self.irq.into())?)
    }
}

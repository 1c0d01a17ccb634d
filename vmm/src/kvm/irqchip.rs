// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! State of the interrupt controllers that all vCPUs share.

use kvm_bindings::{KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_irqchip};
use kvm_ioctls::VmFd;

use super::KvmError;

/// The two 8259s and the I/O APIC.
pub struct IrqchipState([kvm_irqchip; 3]);

impl IrqchipState {
    /// Reads it.
    pub fn save(vm: &VmFd) -> Result<Self, KvmError> {
        let chips = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC];
        let mut state = chips.map(|chip_id| kvm_irqchip { chip_id, ..Default::default() });
        for chip in &mut state {
            vm.get_irqchip(chip).map_err(KvmError::call("reading an interrupt controller"))?;
        }
        Ok(Self(state))
    }

    /// Puts it back.
    pub fn restore(&self, vm: &VmFd) -> Result<(), KvmError> {
        self.0
            .iter()
            .try_for_each(|chip| vm.set_irqchip(chip).map_err(KvmError::call("resetting an interrupt controller")))
    }
}

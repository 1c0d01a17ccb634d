// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Interrupt controllers that all vCPUs share: their creation, their lines and their state.

use devices::state::StateError;
use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_irq_routing_entry,
    kvm_irqchip,
};
use kvm_ioctls::VmFd;
use serde::{Deserialize, Serialize};

use super::kvm_bytes::KvmBytes;
use super::layout::{FIRST_MSI_GSI, KVM_IDENTITY_MAP, KVM_TSS};
use crate::kvm::KvmError;
#[cfg(test)]
use crate::kvm::KvmVm;

/// Creates the interrupt controllers of a new VM in the kernel. Also sets the addresses of KVM's own pages: the identity map and the task
/// state segment.
pub fn create(vm: &VmFd) -> Result<(), KvmError> {
    vm.set_identity_map_address(KVM_IDENTITY_MAP).map_err(KvmError::call("place KVM's identity map"))?;
    vm.set_tss_address(KVM_TSS).map_err(KvmError::call("place KVM's task state segment"))?;
    vm.create_irq_chip().map_err(KvmError::call("create the interrupt controllers"))
}

/// Creates a VM with interrupt controllers, for tests. If the host has no KVM, prints the reason and returns `None`.
#[cfg(test)]
pub(crate) fn vm_for_test() -> Option<KvmVm> {
    let made = crate::kvm::open().and_then(KvmVm::new).and_then(|vm| create(&vm.fd).map(|()| vm));
    made.inspect_err(|error| eprintln!("skipped: {error}")).ok()
}

/// Returns the routes of the interrupt lines: 16 of the 8259s, 24 of the I/O APIC.
pub fn line_routes() -> Vec<kvm_irq_routing_entry> {
    let pic = (0..16).map(|gsi| {
        let chip = if gsi < 8 { KVM_IRQCHIP_PIC_MASTER } else { KVM_IRQCHIP_PIC_SLAVE };
        line_route(gsi, chip, gsi % 8)
    });
    let io_apic = (0..FIRST_MSI_GSI).map(|gsi| line_route(gsi, KVM_IRQCHIP_IOAPIC, gsi));
    pic.chain(io_apic).collect()
}

fn line_route(gsi: u32, irqchip: u32, pin: u32) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry { gsi, type_: KVM_IRQ_ROUTING_IRQCHIP, ..Default::default() };
    entry.u.irqchip.irqchip = irqchip;
    entry.u.irqchip.pin = pin;
    entry
}

/// State of the two 8259s and the I/O APIC.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(Default))]
pub struct IrqchipState([KvmBytes<kvm_irqchip>; 3]);

/// Chips in the order in which [`IrqchipState`] contains them.
const CHIPS: [u32; 3] = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC];

impl IrqchipState {
    /// Reads the state.
    pub fn save(vm: &VmFd) -> Result<Self, KvmError> {
        let mut state = CHIPS.map(|chip_id| KvmBytes(kvm_irqchip { chip_id, ..Default::default() }));
        for chip in &mut state {
            vm.get_irqchip(&mut chip.0).map_err(KvmError::call("read an interrupt controller"))?;
        }
        Ok(Self(state))
    }

    /// Restores the state.
    pub fn restore(&self, vm: &VmFd) -> Result<(), KvmError> {
        if self.0.each_ref().map(|chip| chip.0.chip_id) != CHIPS {
            return Err(StateError::rule(
                "irqchip",
                "the saved interrupt controllers must be the two 8259s and the I/O APIC, in this order: restore from an unmodified snapshot",
            )
            .into());
        }
        self.0
            .iter()
            .try_for_each(|chip| vm.set_irqchip(&chip.0).map_err(KvmError::call("set an interrupt controller")))
    }
}

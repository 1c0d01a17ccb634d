// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Doorbells: guest writes that KVM turns into events (`KVM_IOEVENTFD`, Documentation/virt/kvm/api.rst).

use std::io;
use std::sync::Arc;

use devices::platform::{Doorbells, Space};
use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use vmm_sys_util::eventfd::EventFd;

/// Doorbells of a VM.
pub struct KvmDoorbells {
    vm: Arc<VmFd>,
}

impl KvmDoorbells {
    /// Creates the doorbells of `vm`.
    pub fn new(vm: Arc<VmFd>) -> Self {
        Self { vm }
    }
}

fn place(space: Space, address: u64) -> IoEventAddress {
    match space {
        Space::Port => IoEventAddress::Pio(address),
        Space::Memory => IoEventAddress::Mmio(address),
    }
}

impl Doorbells for KvmDoorbells {
    fn connect(&self, space: Space, address: u64, event: &EventFd) -> io::Result<()> {
        Ok(self.vm.register_ioevent(event, &place(space, address), NoDatamatch)?)
    }

    fn disconnect(&self, space: Space, address: u64, event: &EventFd) -> io::Result<()> {
        Ok(self.vm.unregister_ioevent(event, &place(space, address), NoDatamatch)?)
    }
}

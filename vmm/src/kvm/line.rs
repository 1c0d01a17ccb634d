// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Level-triggered interrupt lines.

use std::io;
use std::sync::Arc;

use devices::platform::InterruptLine;
use kvm_ioctls::VmFd;

/// An interrupt line of the I/O APIC.
pub struct KvmLine {
    vm: Arc<VmFd>,
    gsi: u32,
}

impl KvmLine {
    /// Line `gsi` of `vm`.
    pub fn new(vm: Arc<VmFd>, gsi: u32) -> Self {
        Self { vm, gsi }
    }
}

impl InterruptLine for KvmLine {
    fn set(&self, active: bool) -> io::Result<()> {
        Ok(self.vm.set_irq_line(self.gsi, active)?)
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The VM in the kernel: KVM's descriptors, memory slots, interrupt routes, and the state of vCPUs.

pub mod cpuid;
mod irqchip;
pub mod line;
pub mod msi;
pub mod registers;
pub mod slots;
mod vfio_device;

use std::io;
use std::sync::Arc;

use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use thiserror::Error;

pub use irqchip::IrqchipState;
pub use vfio_device::create_vfio_device;

use crate::layout::{KVM_IDENTITY_MAP, KVM_TSS};

/// Why the VM could not be set up in the kernel.
#[derive(Debug, Error)]
pub enum KvmError {
    /// `/dev/kvm` cannot be opened.
    #[error("/dev/kvm: {source}: {advice}")]
    Open {
        /// What the kernel said.
        source: io::Error,
        /// How to mend it.
        advice: &'static str,
    },
    /// The kernel's KVM lacks something.
    #[error("/dev/kvm: this kernel's KVM has no {0}")]
    Missing(&'static str),
    /// A call failed.
    #[error("{what}: {source}")]
    Call {
        /// What was being done.
        what: String,
        /// What the kernel said.
        source: io::Error,
    },
}

impl KvmError {
    /// Whether the user can mend it.
    pub fn is_user_error(&self) -> bool {
        matches!(self, Self::Open { .. })
    }

    pub(crate) fn call(what: impl Into<String>) -> impl FnOnce(kvm_ioctls::Error) -> Self {
        let what = what.into();
        move |error| Self::Call { what, source: error.into() }
    }
}

/// Capabilities without which Carom cannot run a guest.
const NEEDED: [(Cap, &str); 6] = [
    (Cap::UserMemory, "user memory slots"),
    (Cap::Irqchip, "interrupt controller"),
    (Cap::Irqfd, "irqfd"),
    (Cap::ImmediateExit, "immediate exit"),
    (Cap::ExtCpuid, "CPUID"),
    (Cap::SignalMsi, "MSI"),
];

/// `/dev/kvm` and the VM made through it.
pub struct KvmVm {
    /// The system descriptor.
    pub kvm: Kvm,
    /// The VM's descriptor.
    pub fd: Arc<VmFd>,
}

impl KvmVm {
    /// Makes a VM with the interrupt controllers in the kernel and no memory.
    pub fn new() -> Result<Self, KvmError> {
        let kvm = open()?;
        let fd = kvm.create_vm().map_err(KvmError::call("creating a VM"))?;
        fd.set_identity_map_address(KVM_IDENTITY_MAP).map_err(KvmError::call("placing KVM's identity map"))?;
        fd.set_tss_address(KVM_TSS).map_err(KvmError::call("placing KVM's task state segment"))?;
        fd.create_irq_chip().map_err(KvmError::call("creating the interrupt controllers"))?;
        Ok(Self { kvm, fd: Arc::new(fd) })
    }

    /// Makes vCPU `id`.
    pub fn create_vcpu(&self, id: u32) -> Result<VcpuFd, KvmError> {
        self.fd.create_vcpu(u64::from(id)).map_err(KvmError::call(format!("creating vCPU {id}")))
    }
}

fn open() -> Result<Kvm, KvmError> {
    let kvm = Kvm::new().map_err(|error| {
        let source = io::Error::from(error);
        let advice = match source.raw_os_error() {
            Some(libc::ENOENT) => {
                "load the kernel's kvm_intel or kvm_amd module, or turn virtualization on in the firmware"
            }
            Some(libc::EACCES | libc::EPERM) => "run as root, or join the group that owns it (usually 'kvm')",
            Some(libc::ENXIO | libc::ENODEV) => {
                "this CPU has no virtualization extensions, or the firmware turned them off"
            }
            _ => "is KVM available on this machine?",
        };
        KvmError::Open { source, advice }
    })?;
    match NEEDED.iter().find(|(cap, _)| !kvm.check_extension(*cap)) {
        Some((_, name)) => Err(KvmError::Missing(name)),
        None => Ok(kvm),
    }
}

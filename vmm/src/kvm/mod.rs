// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The VM in the kernel: KVM's descriptors, memory slots, interrupt lines and routes, doorbells, and VFIO device.

pub mod doorbells;
mod error;
pub mod line;
pub mod msi;
mod port_access;
pub mod slots;
mod vfio_device;

use std::io;
use std::sync::Arc;

use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};

pub use error::KvmError;
pub use port_access::port_accesses;
pub use vfio_device::{KvmVfioFiles, create_vfio_device};

use crate::process::inherited;

/// Capabilities that Carom requires.
const NEEDED: [(Cap, &str); 6] = [
    (Cap::UserMemory, "user memory slots (KVM_CAP_USER_MEMORY)"),
    (Cap::Irqchip, "interrupt controller (KVM_CAP_IRQCHIP)"),
    (Cap::Irqfd, "irqfd (KVM_CAP_IRQFD)"),
    (Cap::ImmediateExit, "immediate exit (KVM_CAP_IMMEDIATE_EXIT, since Linux 4.11)"),
    (Cap::ExtCpuid, "CPUID (KVM_CAP_EXT_CPUID)"),
    (Cap::SignalMsi, "MSI (KVM_CAP_SIGNAL_MSI)"),
];

/// Descriptors of `/dev/kvm` and of a VM.
pub struct KvmVm {
    /// Descriptor of `/dev/kvm`.
    pub kvm: Kvm,
    /// Descriptor of the VM.
    pub fd: Arc<VmFd>,
}

impl KvmVm {
    /// Creates a VM without memory, interrupt controllers and vCPUs.
    pub fn new(kvm: Kvm) -> Result<Self, KvmError> {
        let fd = create_vm(&kvm).map_err(KvmError::call("create a VM"))?;
        Ok(Self { kvm, fd: Arc::new(fd) })
    }

    /// Creates vCPU `id`.
    pub fn create_vcpu(&self, id: u32) -> Result<VcpuFd, KvmError> {
        self.fd.create_vcpu(u64::from(id)).map_err(KvmError::call(format!("create vCPU {id}")))
    }
}

/// Creates a VM. If a signal interrupts the system call, no VM was created, so the call is repeated.
fn create_vm(kvm: &Kvm) -> Result<VmFd, kvm_ioctls::Error> {
    loop {
        match kvm.create_vm() {
            Err(error) if error.errno() == libc::EINTR => {}
            made => return made,
        }
    }
}

/// Opens `/dev/kvm`, or uses the inherited descriptor. Checks that KVM supports the required capabilities.
pub fn open() -> Result<Kvm, KvmError> {
    let advice = "check the descriptor that carom inherited (--inherit)";
    if let Some(kvm) = inherited::kvm().map_err(|source| KvmError::Open { source, advice })? {
        return check(kvm);
    }
    let kvm = Kvm::new().map_err(|error| {
        let source = io::Error::from(error);
        let advice = match source.raw_os_error() {
            Some(libc::ENOENT) => {
                "load the kernel's kvm_intel or kvm_amd module, or enable virtualization in the firmware"
            }
            Some(libc::EACCES | libc::EPERM) => "run as root, or join the group that owns /dev/kvm (usually 'kvm')",
            Some(libc::ENXIO | libc::ENODEV) => {
                "use a CPU with virtualization extensions, and enable them in the firmware"
            }
            _ => "check that this machine supports KVM",
        };
        KvmError::Open { source, advice }
    })?;
    check(kvm)
}

fn check(kvm: Kvm) -> Result<Kvm, KvmError> {
    match NEEDED.iter().find(|(cap, _)| !kvm.check_extension(*cap)) {
        Some((_, name)) => Err(KvmError::Missing(name)),
        None => Ok(kvm),
    }
}

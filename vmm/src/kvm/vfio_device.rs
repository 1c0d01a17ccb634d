// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! KVM's VFIO pseudo device, through which the VMM passes the VM's VFIO files to KVM (Documentation/virt/kvm/devices/vfio.rst).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use devices::platform::VfioFiles;
use kvm_bindings::{
    KVM_DEV_VFIO_FILE, KVM_DEV_VFIO_FILE_ADD, KVM_DEV_VFIO_FILE_DEL, kvm_create_device, kvm_device_attr,
    kvm_device_type_KVM_DEV_TYPE_VFIO,
};
use kvm_ioctls::{DeviceFd, VmFd};

use super::KvmError;

/// Creates KVM's VFIO pseudo device. A VM has at most one.
pub fn create_vfio_device(vm: &VmFd) -> Result<DeviceFd, KvmError> {
    let mut device = kvm_create_device { type_: kvm_device_type_KVM_DEV_TYPE_VFIO, fd: 0, flags: 0 };
    vm.create_device(&mut device).map_err(KvmError::call("create KVM's VFIO device"))
}

/// List of the VM's VFIO files in KVM's VFIO pseudo device.
pub struct KvmVfioFiles(pub DeviceFd);

impl KvmVfioFiles {
    fn change(&self, attr: u32, file: BorrowedFd<'_>) -> io::Result<()> {
        let number = file.as_raw_fd();
        // The kernel reads the descriptor number from this address.
        let addr = std::ptr::from_ref(&number) as u64;
        let change = kvm_device_attr { flags: 0, group: KVM_DEV_VFIO_FILE, attr: attr.into(), addr };
        Ok(self.0.set_device_attr(&change)?)
    }
}

impl VfioFiles for KvmVfioFiles {
    fn add(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        self.change(KVM_DEV_VFIO_FILE_ADD, file)
    }
    fn remove(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        self.change(KVM_DEV_VFIO_FILE_DEL, file)
    }
}

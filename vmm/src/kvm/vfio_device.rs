// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! KVM's VFIO pseudo device, by which KVM learns which VFIO groups the VM uses.

use kvm_bindings::{kvm_create_device, kvm_device_type_KVM_DEV_TYPE_VFIO};
use kvm_ioctls::{DeviceFd, VmFd};

use super::KvmError;

/// Makes the device; one a VM (Documentation/virt/kvm/devices/vfio.rst).
pub fn create_vfio_device(vm: &VmFd) -> Result<DeviceFd, KvmError> {
    let mut device = kvm_create_device { type_: kvm_device_type_KVM_DEV_TYPE_VFIO, fd: 0, flags: 0 };
    vm.create_device(&mut device).map_err(KvmError::call("creating KVM's VFIO device"))
}

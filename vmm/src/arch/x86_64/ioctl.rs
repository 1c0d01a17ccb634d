// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! KVM's ioctls on vCPUs that need unsafe code, or that `kvm-ioctls` lacks (Documentation/virt/kvm/api.rst). All unsafe code for saved
//! state is in this file.

use std::io;

use kvm_bindings::{
    KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, KVMIO, Xsave, kvm_device_attr, kvm_sregs2, kvm_xsave, kvm_xsave2,
};
use kvm_ioctls::{Cap, VcpuFd, VmFd};
use vmm_sys_util::fam::FamStruct;
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref};
use vmm_sys_util::{ioctl_ior_nr, ioctl_iow_nr};
use zerocopy::{FromBytes, IntoBytes};

ioctl_ior_nr!(KVM_GET_SREGS2, KVMIO, 0xcc, kvm_sregs2);
ioctl_iow_nr!(KVM_SET_SREGS2, KVMIO, 0xcd, kvm_sregs2);
ioctl_iow_nr!(KVM_SET_DEVICE_ATTR, KVMIO, 0xe1, kvm_device_attr);
ioctl_iow_nr!(KVM_GET_DEVICE_ATTR, KVMIO, 0xe2, kvm_device_attr);

/// Length in bytes of the extended state area that every kernel supports.
const XSAVE_LEN: usize = size_of::<kvm_xsave>();

/// Returns the size in bytes of a vCPU's extended state area on this host. The size exceeds 4 KiB if the guest may use AMX.
pub(super) fn xsave_len(vm: &VmFd) -> usize {
    usize::try_from(vm.check_extension_int(Cap::Xsave2)).unwrap_or(0).max(XSAVE_LEN)
}

/// Returns a zeroed extended state area of `len` bytes.
fn new_xsave(len: usize) -> io::Result<Xsave> {
    let more = len.saturating_sub(XSAVE_LEN).div_ceil(size_of::<<kvm_xsave2 as FamStruct>::Entry>());
    Xsave::new(more).map_err(|error| io::Error::other(format!("cannot allocate the XSAVE area: {error:?}")))
}

/// Reads a vCPU's extended state: x87, SSE, AVX and later extensions.
pub(super) fn xsave(vm: &VmFd, vcpu: &VcpuFd) -> io::Result<Vec<u8>> {
    let len = xsave_len(vm);
    if len == XSAVE_LEN {
        return Ok(vcpu.get_xsave()?.region.as_bytes().to_vec());
    }
    let mut area = new_xsave(len)?;
    // SAFETY: The area has the size that KVM reports. The size cannot grow meanwhile, because the program never enables further features.
    unsafe { vcpu.get_xsave2(&mut area) }?;
    Ok([area.as_fam_struct_ref().xsave.region.as_bytes(), area.as_slice().as_bytes()].concat())
}

/// Sets a vCPU's extended state to `bytes`. If this host's area is larger than `bytes`, the rest of the area is set to its initial state.
///
/// # Errors
/// `bytes` is longer than this host's area or has an invalid length, or KVM rejects the state.
pub(super) fn set_xsave(vm: &VmFd, vcpu: &VcpuFd, bytes: &[u8]) -> io::Result<()> {
    let len = xsave_len(vm);
    let mut area = new_xsave(len)?;
    let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    if bytes.len() < XSAVE_LEN || bytes.len() > len || !bytes.len().is_multiple_of(4) {
        return Err(invalid(format!(
            "the saved XSAVE area has {} bytes, but this host needs a multiple of 4 from {XSAVE_LEN} to {len} bytes: restore an unmodified snapshot, on a host with all CPU features of the host that saved it",
            bytes.len()
        )));
    }
    let (first, rest) = bytes.split_at(XSAVE_LEN);
    let region = <[u32; 1024]>::read_from_bytes(first)
        .map_err(|_| invalid("the first part of the saved XSAVE area is not 4 KiB long".into()))?;
    for (word, value) in area.as_mut_slice().iter_mut().zip(rest.chunks_exact(4)) {
        *word = u32::from_le_bytes([value[0], value[1], value[2], value[3]]);
    }
    // SAFETY: The length of the area's flexible part does not change.
    unsafe { area.as_mut_fam_struct() }.xsave.region = region;
    // SAFETY: The area has the size that KVM reports. The size cannot grow meanwhile, because the program never enables further features.
    Ok(unsafe { vcpu.set_xsave2(&area) }?)
}

/// Reads special registers, including the page directory pointers of PAE paging.
pub(super) fn sregs2(vcpu: &VcpuFd) -> io::Result<kvm_sregs2> {
    let mut sregs = kvm_sregs2::default();
    // SAFETY: This ioctl writes only a `kvm_sregs2`, and `sregs` has this type.
    match unsafe { ioctl_with_mut_ref(vcpu, KVM_GET_SREGS2(), &mut sregs) } {
        0 => Ok(sregs),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sets special registers.
pub(super) fn set_sregs2(vcpu: &VcpuFd, sregs: &kvm_sregs2) -> io::Result<()> {
    // SAFETY: This ioctl reads only a `kvm_sregs2`, and `sregs` has this type.
    match unsafe { ioctl_with_ref(vcpu, KVM_SET_SREGS2(), sregs) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns the offset of a vCPU's time stamp counter from the host's counter (Documentation/virt/kvm/devices/vcpu.rst, section 4.1).
pub(super) fn tsc_offset(vcpu: &VcpuFd) -> io::Result<u64> {
    let mut offset = 0u64;
    let attribute = tsc_attribute((&raw mut offset).expose_provenance());
    // SAFETY: KVM writes the attribute's 64 bits to `offset`, which lives until the call returns.
    match unsafe { ioctl_with_ref(vcpu, KVM_GET_DEVICE_ATTR(), &attribute) } {
        0 => Ok(offset),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sets the offset of a vCPU's time stamp counter from the host's counter.
pub(super) fn set_tsc_offset(vcpu: &VcpuFd, offset: u64) -> io::Result<()> {
    let attribute = tsc_attribute((&raw const offset).expose_provenance());
    // SAFETY: KVM reads the attribute's 64 bits from `offset`, which lives until the call returns.
    match unsafe { ioctl_with_ref(vcpu, KVM_SET_DEVICE_ATTR(), &attribute) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn tsc_attribute(address: usize) -> kvm_device_attr {
    kvm_device_attr { flags: 0, group: KVM_VCPU_TSC_CTRL, attr: KVM_VCPU_TSC_OFFSET.into(), addr: address as u64 }
}

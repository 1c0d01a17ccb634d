// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Model-specific registers of a vCPU. The registers are accessed one at a time. So the failure of one access does not prevent access to
//! the other registers.

use kvm_bindings::{Msrs, kvm_msr_entry};
use kvm_ioctls::{Kvm, VcpuFd};

use crate::kvm::KvmError;

/// Time stamp counter.
pub(super) const TSC: u32 = 0x10;
/// `IA32_FEATURE_CONTROL`: enables VMX, which nested state relies on.
pub(super) const FEATURE_CONTROL: u32 = 0x3a;
/// `IA32_TSC_DEADLINE`: deadline of the local APIC's timer, as a value of the time stamp counter. The timer accepts a deadline
/// only in TSC-deadline mode.
pub(super) const TSC_DEADLINE: u32 = 0x6e0;

/// Hyper-V's clock, which cannot be written.
const TIME_REF_COUNT: u32 = 0x4000_0020;

fn one(index: u32, data: u64) -> Result<Msrs, KvmError> {
    let entry = kvm_msr_entry { index, data, ..Default::default() };
    Msrs::from_entries(&[entry]).map_err(|error| {
        KvmError::other(format!("access MSR {index:#x}"), format!("cannot allocate the list for this MSR: {error:?}"))
    })
}

/// Returns the value of a register. Returns `None` if KVM does not report the register.
pub(super) fn read(vcpu: &VcpuFd, index: u32) -> Result<Option<u64>, KvmError> {
    let mut entry = one(index, 0)?;
    let read = vcpu.get_msrs(&mut entry).is_ok_and(|count| count == 1);
    Ok(entry.as_slice().first().filter(|_| read).map(|entry| entry.data))
}

/// Writes a register. Returns `false` if KVM rejects the value.
pub(super) fn write(vcpu: &VcpuFd, entry: kvm_msr_entry) -> Result<bool, KvmError> {
    match vcpu.set_msrs(&one(entry.index, entry.data)?) {
        Ok(1) => Ok(true),
        Ok(_) => {
            log::debug!("KVM rejects the value of model-specific register {:#x}", entry.index);
            Ok(false)
        }
        Err(error) => Err(KvmError::call(format!("write MSR {:#x}", entry.index))(error)),
    }
}

/// Returns the registers that KVM lists as the state of a vCPU. The list includes the registers that KVM defines itself for kvmclock,
/// stolen time and asynchronous page faults. The result does not contain the time stamp counter and Hyper-V's clock, because these
/// registers change by themselves.
pub(super) fn read_all(kvm: &Kvm, vcpu: &VcpuFd) -> Result<Vec<kvm_msr_entry>, KvmError> {
    let list = kvm.get_msr_index_list().map_err(KvmError::call("list model-specific registers"))?;
    let mut all = Vec::with_capacity(list.as_slice().len());
    for index in list.as_slice().iter().copied().filter(|index| ![TSC, TIME_REF_COUNT].contains(index)) {
        all.extend(read(vcpu, index)?.map(|data| kvm_msr_entry { index, data, ..Default::default() }));
    }
    Ok(all)
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! All registers of a vCPU except its time stamp counter. A reset sets the registers to their power-on values. A restore from a snapshot
//! sets them to their saved values.

use devices::state::StateError;
use kvm_bindings::nested::KvmNestedStateBuffer;
use kvm_bindings::{
    KVM_STATE_NESTED_FORMAT_VMX, KVM_STATE_NESTED_GIF_SET, kvm_debugregs, kvm_lapic_state, kvm_mp_state, kvm_msr_entry,
    kvm_nested_state, kvm_regs, kvm_sregs, kvm_sregs2, kvm_vcpu_events, kvm_vmx_nested_state_hdr, kvm_xcrs,
};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use serde::{Deserialize, Serialize};
use zerocopy::{FromBytes, IntoBytes};

use super::kvm_bytes::{self, KvmBytes};
use super::{ioctl, msr};
use crate::kvm::KvmError;

/// Bit of `kvm_sregs2.flags`: the page directory pointers are valid.
const PDPTRS_VALID: u64 = 1;

/// Saved model-specific register.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct MsrState {
    index: u32,
    value: u64,
}

/// Saved registers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(Default))]
#[serde(deny_unknown_fields)]
pub struct VcpuState {
    regs: KvmBytes<kvm_regs>,
    sregs: KvmBytes<kvm_sregs>,
    /// Page directory pointers, if they are valid. They are saved because memory may have changed since the vCPU loaded them.
    pdptrs: Option<[u64; 4]>,
    #[serde(with = "kvm_bytes::bytes")]
    xsave: Vec<u8>,
    /// `None` on a CPU without XSAVE.
    xcrs: Option<KvmBytes<kvm_xcrs>>,
    lapic: KvmBytes<kvm_lapic_state>,
    msrs: Vec<MsrState>,
    /// Nested state: the guest's own use of virtualization extensions, if the guest has them.
    #[serde(with = "kvm_bytes::bytes")]
    nested: Vec<u8>,
    mp_state: KvmBytes<kvm_mp_state>,
    events: KvmBytes<kvm_vcpu_events>,
    debug: KvmBytes<kvm_debugregs>,
}

/// Handling of a model-specific register that cannot be written on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnwritableMsr {
    /// The register keeps its value. Use this for a state that was read from the same vCPU.
    Leave,
    /// Restoring fails, unless the register already has the value. Use this for a state that may come from another host.
    Refuse,
}

fn failed(what: &'static str) -> impl FnOnce(std::io::Error) -> KvmError {
    move |source| KvmError::Call { what: what.into(), source }
}

impl VcpuState {
    /// Reads the state of a vCPU that is not running and whose CPUID is set.
    pub fn save(kvm: &Kvm, vm: &VmFd, vcpu: &VcpuFd) -> Result<Self, KvmError> {
        // The run state is read first, because this read makes KVM apply pending INIT and SIPI to the run state. KVM may also change
        // events, which are read later.
        let mp_state = vcpu.get_mp_state().map_err(KvmError::call("read a vCPU's run state"))?;
        let pdptrs = ioctl::sregs2(vcpu).ok().filter(|sregs| sregs.flags & PDPTRS_VALID != 0).map(|sregs| sregs.pdptrs);
        let msrs = msr::read_all(kvm, vcpu)?;
        Ok(Self {
            mp_state: KvmBytes(mp_state),
            regs: KvmBytes(vcpu.get_regs().map_err(KvmError::call("read a vCPU's registers"))?),
            sregs: KvmBytes(vcpu.get_sregs().map_err(KvmError::call("read a vCPU's special registers"))?),
            pdptrs,
            xsave: ioctl::xsave(vm, vcpu).map_err(failed("read a vCPU's extended state"))?,
            xcrs: vcpu.get_xcrs().ok().map(KvmBytes),
            lapic: KvmBytes(vcpu.get_lapic().map_err(KvmError::call("read a vCPU's local APIC"))?),
            msrs: msrs.into_iter().map(|entry| MsrState { index: entry.index, value: entry.data }).collect(),
            nested: nested(kvm, vcpu)?,
            debug: KvmBytes(vcpu.get_debug_regs().map_err(KvmError::call("read a vCPU's debug registers"))?),
            events: KvmBytes(vcpu.get_vcpu_events().map_err(KvmError::call("read a vCPU's pending events"))?),
        })
    }

    /// Restores the state of a vCPU that is not running and has the saved CPUID. The vCPU's time stamp counter must be set before this
    /// call, because timers are armed relative to the counter.
    ///
    /// KVM requires a certain order. Special registers come first, because they enable the features that nested state needs, and set the
    /// address of the local APIC. Setting the general registers drops pending exceptions, so events are restored later. The local APIC
    /// accepts a timer's deadline only in TSC-deadline mode, so the deadline is restored after the local APIC.
    pub fn restore(&self, kvm: &Kvm, vm: &VmFd, vcpu: &VcpuFd, unwritable: UnwritableMsr) -> Result<(), KvmError> {
        // A running nested guest would prevent setting special registers.
        leave_nested(kvm, vcpu)?;
        self.restore_sregs(vcpu)?;
        self.restore_msrs(vcpu, unwritable, |index| index == msr::FEATURE_CONTROL)?;
        self.restore_nested(kvm, vcpu)?;
        vcpu.set_regs(&self.regs.0).map_err(KvmError::call("set a vCPU's registers"))?;
        if let Some(xcrs) = &self.xcrs {
            vcpu.set_xcrs(&xcrs.0).map_err(KvmError::call("set a vCPU's extended control registers"))?;
        }
        ioctl::set_xsave(vm, vcpu, &self.xsave).map_err(failed("set a vCPU's extended state"))?;
        vcpu.set_lapic(&self.lapic.0).map_err(KvmError::call("set a vCPU's local APIC"))?;
        self.restore_msrs(vcpu, unwritable, |index| {
            !matches!(index, msr::FEATURE_CONTROL | msr::TSC | msr::TSC_DEADLINE)
        })?;
        self.restore_msrs(vcpu, unwritable, |index| index == msr::TSC_DEADLINE)?;
        vcpu.set_debug_regs(&self.debug.0).map_err(KvmError::call("set a vCPU's debug registers"))?;
        vcpu.set_mp_state(self.mp_state.0).map_err(KvmError::call("set a vCPU's run state"))?;
        vcpu.set_vcpu_events(&self.events.0).map_err(KvmError::call("set a vCPU's pending events"))
    }

    fn restore_sregs(&self, vcpu: &VcpuFd) -> Result<(), KvmError> {
        let sregs = &self.sregs.0;
        let Some(pdptrs) = self.pdptrs else {
            return vcpu.set_sregs(sregs).map_err(KvmError::call("set a vCPU's special registers"));
        };
        let kvm_sregs { cs, ds, es, fs, gs, ss, tr, ldt, gdt, idt, cr0, cr2, cr3, cr4, cr8, efer, apic_base, .. } =
            *sregs;
        let flags = PDPTRS_VALID;
        let sregs = kvm_sregs2 {
            cs,
            ds,
            es,
            fs,
            gs,
            ss,
            tr,
            ldt,
            gdt,
            idt,
            cr0,
            cr2,
            cr3,
            cr4,
            cr8,
            efer,
            apic_base,
            flags,
            pdptrs,
        };
        ioctl::set_sregs2(vcpu, &sregs).map_err(failed("set a vCPU's special registers"))
    }

    fn restore_msrs(
        &self,
        vcpu: &VcpuFd,
        unwritable: UnwritableMsr,
        which: impl Fn(u32) -> bool,
    ) -> Result<(), KvmError> {
        for MsrState { index, value } in self.msrs.iter().copied().filter(|msr| which(msr.index)) {
            let written = msr::write(vcpu, kvm_msr_entry { index, data: value, ..Default::default() })?;
            if !written && unwritable == UnwritableMsr::Refuse && msr::read(vcpu, index)? != Some(value) {
                let rule = format!(
                    "this host rejects {value:#x}, the value from the snapshot: restore the VM on a host that supports this value"
                );
                return Err(StateError::rule(format!("model-specific register {index:#x}"), rule).into());
            }
        }
        Ok(())
    }

    fn restore_nested(&self, kvm: &Kvm, vcpu: &VcpuFd) -> Result<(), KvmError> {
        if self.nested.is_empty() {
            return Ok(());
        }
        if !kvm.check_extension(Cap::NestedState) {
            let rule = "this host's KVM does not support nested virtualization, which the guest uses: \
                        load kvm_intel or kvm_amd with nested=1";
            return Err(StateError::rule("nested", rule).into());
        }
        let buffer = nested_of(&self.nested)?;
        vcpu.set_nested_state(&buffer).map_err(KvmError::call("set the state of the guest's own virtualization"))
    }
}

/// Bytes of KVM's header of nested state. The header contains the size of the whole nested state.
const NESTED_HEADER: usize = size_of::<kvm_nested_state>();

/// Returns the guest's nested state with its exact length. Returns an empty vector if KVM or the vCPU does not support nested state.
fn nested(kvm: &Kvm, vcpu: &VcpuFd) -> Result<Vec<u8>, KvmError> {
    if !kvm.check_extension(Cap::NestedState) {
        return Ok(Vec::new());
    }
    let mut buffer = KvmNestedStateBuffer::empty();
    match vcpu.nested_state(&mut buffer) {
        Ok(_) => {}
        // The vCPU's CPUID has no virtualization extensions.
        Err(error) if error.errno() == libc::EINVAL => return Ok(Vec::new()),
        Err(error) => return Err(KvmError::call("read the state of the guest's own virtualization")(error)),
    }
    let len = usize::try_from(buffer.size).unwrap_or(usize::MAX);
    Ok(buffer.as_bytes().iter().take(len).copied().collect())
}

/// Converts nested state to KVM's structure.
fn nested_of(bytes: &[u8]) -> Result<KvmNestedStateBuffer, KvmError> {
    let rule = |rule: &str| KvmError::from(StateError::rule("nested", rule));
    if bytes.len() < NESTED_HEADER || bytes.len() > size_of::<KvmNestedStateBuffer>() {
        let (len, most) = (bytes.len(), size_of::<KvmNestedStateBuffer>());
        return Err(rule(&format!(
            "the saved nested state has {len} bytes, but KVM needs {NESTED_HEADER} to {most} bytes: restore from an unmodified snapshot"
        )));
    }
    let mut padded = bytes.to_vec();
    padded.resize(size_of::<KvmNestedStateBuffer>(), 0);
    let buffer: KvmNestedStateBuffer = KvmNestedStateBuffer::read_from_bytes(&padded)
        .map_err(|_| rule("the saved nested state is not KVM's structure"))?;
    if usize::try_from(buffer.size).ok() != Some(bytes.len()) {
        return Err(rule(&format!(
            "the saved nested state has {} bytes, but its header says {}: restore from an unmodified snapshot",
            bytes.len(),
            buffer.size
        )));
    }
    Ok(buffer)
}

/// Ends a nested guest of a vCPU, and disables the virtualization extensions.
fn leave_nested(kvm: &Kvm, vcpu: &VcpuFd) -> Result<(), KvmError> {
    let bytes = nested(kvm, vcpu)?;
    if bytes.is_empty() {
        return Ok(());
    }
    let mut buffer = KvmNestedStateBuffer::empty();
    buffer.format = nested_of(&bytes)?.format;
    buffer.size = u32::try_from(NESTED_HEADER).expect("the header has a few bytes");
    if u32::from(buffer.format) == KVM_STATE_NESTED_FORMAT_VMX {
        // No VMXON region, and no VMCS.
        buffer.hdr.vmx = kvm_vmx_nested_state_hdr { vmxon_pa: u64::MAX, vmcs12_pa: u64::MAX, ..Default::default() };
    } else {
        // SVM: the global interrupt flag is set.
        buffer.flags = u16::try_from(KVM_STATE_NESTED_GIF_SET).expect("the flags have 16 bits");
    }
    vcpu.set_nested_state(&buffer).map_err(KvmError::call("end the guest's own virtualization"))
}

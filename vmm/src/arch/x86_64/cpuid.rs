// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What CPUID tells the guest: what KVM supports, with this vCPU's place in the topology (one socket, one thread a
//! core) and the features that KVM emulates but does not report.

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::{Cap, Kvm};

use crate::kvm::KvmError;

/// Leaf 1, ECX: the local APIC's timer takes a TSC deadline.
const TSC_DEADLINE: u32 = 1 << 24;
/// Leaf 1, ECX: running under a hypervisor.
const HYPERVISOR: u32 = 1 << 31;
/// Leaf 1, EDX: more than one logical processor in the package.
const HTT: u32 = 1 << 28;
/// Leaf 0xb, ECX bits 8 to 15: level type "thread".
const LEVEL_SMT: u32 = 1 << 8;
/// Leaf 0xb, ECX bits 8 to 15: level type "core".
const LEVEL_CORE: u32 = 2 << 8;

/// The CPUID entries that are the same for all vCPUs.
pub struct CpuidTemplate {
    entries: Vec<kvm_cpuid_entry2>,
    vcpus: u32,
    tsc_deadline: bool,
}

impl CpuidTemplate {
    /// What KVM supports, for a VM of `vcpus` vCPUs.
    pub fn new(kvm: &Kvm, vcpus: u32) -> Result<Self, KvmError> {
        let supported =
            kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(KvmError::call("reading the supported CPUID"))?;
        let tsc_deadline = kvm.check_extension(Cap::TscDeadlineTimer);
        Ok(Self { entries: supported.as_slice().to_vec(), vcpus, tsc_deadline })
    }

    /// Width of the guest's physical addresses in bits (leaf 0x8000_0008).
    pub fn physical_bits(&self) -> u8 {
        let leaf = self.entries.iter().find(|entry| entry.function == 0x8000_0008);
        leaf.map_or(36, |entry| entry.eax.to_le_bytes()[0]).clamp(32, 52)
    }

    /// The entries of vCPU `id`, which is its APIC ID as well.
    pub fn for_vcpu(&self, id: u32) -> Result<CpuId, KvmError> {
        let mut entries = self.entries.clone();
        entries.retain(|entry| !matches!(entry.function, 0xb | 0x1f));
        let max_leaf = entries.iter().find(|entry| entry.function == 0).map_or(0, |entry| entry.eax);
        if max_leaf >= 0xb {
            entries.extend(topology_leaves(id, self.vcpus));
        }
        for entry in &mut entries {
            self.adapt(entry, id);
        }
        CpuId::from_entries(&entries).map_err(|_| KvmError::Missing("room for this CPU's CPUID entries"))
    }

    fn adapt(&self, entry: &mut kvm_cpuid_entry2, id: u32) {
        let logical = self.vcpus.min(255);
        match entry.function {
            1 => {
                entry.ebx = (entry.ebx & 0x0000_ffff) | (logical << 16) | (id << 24);
                entry.ecx |= HYPERVISOR | if self.tsc_deadline { TSC_DEADLINE } else { 0 };
                entry.edx = if self.vcpus > 1 { entry.edx | HTT } else { entry.edx & !HTT };
            }
            // Intel's cache leaves: bits 26 to 31 say how many cores share the package, 14 to 25 how many the cache.
            4 => {
                let shared = if (entry.eax >> 5) & 7 >= 3 { logical - 1 } else { 0 };
                entry.eax = (entry.eax & 0x3fff) | (shared << 14) | ((logical - 1).min(63) << 26);
            }
            // AMD: number of cores less one, and the width of the APIC ID's core part.
            0x8000_0008 => entry.ecx = (logical - 1) | (id_bits(self.vcpus) << 12),
            // AMD: extended APIC ID; compute unit; one node.
            0x8000_001e => (entry.eax, entry.ebx, entry.ecx) = (id, id, 0),
            _ => {}
        }
    }
}

/// How many bits of the APIC ID number the cores of the one package.
fn id_bits(vcpus: u32) -> u32 {
    vcpus.next_power_of_two().trailing_zeros()
}

/// The extended topology leaf 0xb: one thread a core, all cores in one package.
fn topology_leaves(id: u32, vcpus: u32) -> [kvm_cpuid_entry2; 3] {
    // KVM_CPUID_FLAG_SIGNIFICANT_INDEX: the entry holds for its index only.
    let leaf = |index, eax, ebx, kind: u32| kvm_cpuid_entry2 {
        function: 0xb,
        index,
        flags: 1,
        eax,
        ebx,
        ecx: index | kind,
        edx: id,
        ..Default::default()
    };
    [leaf(0, 0, 1, LEVEL_SMT), leaf(1, id_bits(vcpus), vcpus, LEVEL_CORE), leaf(2, 0, 0, 0)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(vcpus: u32) -> CpuidTemplate {
        let leaf = |function| kvm_cpuid_entry2 { function, eax: 0xd, ..Default::default() };
        let mut entries: Vec<_> = [0, 1, 4, 0xb, 0x8000_0008, 0x8000_001e].into_iter().map(leaf).collect();
        entries[4].eax = 0x3028;
        CpuidTemplate { entries, vcpus, tsc_deadline: true }
    }

    fn find(cpuid: &CpuId, function: u32, index: u32) -> kvm_cpuid_entry2 {
        *cpuid.as_slice().iter().find(|e| e.function == function && e.index == index).unwrap()
    }

    #[test]
    fn each_vcpu_has_its_own_apic_id() {
        let template = template(3);
        for id in 0..3 {
            let cpuid = template.for_vcpu(id).unwrap();
            assert_eq!(find(&cpuid, 1, 0).ebx >> 24, id);
            assert_eq!(find(&cpuid, 0xb, 1).edx, id);
            assert_eq!(find(&cpuid, 0xb, 1).eax, 2, "two bits number three cores");
            assert_eq!(find(&cpuid, 0x8000_001e, 0).eax, id);
        }
    }

    #[test]
    fn features_that_kvm_emulates_are_added() {
        let cpuid = template(1).for_vcpu(0).unwrap();
        assert_eq!(find(&cpuid, 1, 0).ecx, HYPERVISOR | TSC_DEADLINE);
        assert_eq!(find(&cpuid, 1, 0).edx & HTT, 0);
    }

    #[test]
    fn physical_address_width_is_read() {
        assert_eq!(template(1).physical_bits(), 40);
    }
}

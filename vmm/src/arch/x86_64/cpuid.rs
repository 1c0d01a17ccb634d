// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! CPUID of the guest. It contains the features that KVM supports, and the features that KVM emulates but does not report. It lacks the
//! features that the configuration disables. It also contains the vCPU's place in the topology (one socket, one thread per core).

use carom_api::config::{CpusConfig, NumaConfig};
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::{Cap, Kvm};

use crate::kvm::KvmError;

/// Leaf 1, ECX: Intel's virtual machine extensions.
const VMX: u32 = 1 << 5;
/// Leaf 0x8000_0001, ECX: AMD's virtual machine extensions.
const SVM: u32 = 1 << 2;
/// Leaf 1, ECX: the local APIC's timer supports TSC-deadline mode.
const TSC_DEADLINE: u32 = 1 << 24;
/// Leaf 1, ECX: running under a hypervisor.
const HYPERVISOR: u32 = 1 << 31;
/// Leaf 1, EDX: more than one logical processor in the package.
const HTT: u32 = 1 << 28;
/// Leaf 0xb, ECX bits 8 to 15: level type "thread".
const LEVEL_SMT: u32 = 1 << 8;
/// Leaf 0xb, ECX bits 8 to 15: level type "core".
const LEVEL_CORE: u32 = 2 << 8;

/// CPUID entries that are the same for all vCPUs.
pub struct CpuidTemplate {
    entries: Vec<kvm_cpuid_entry2>,
    vcpus: u32,
    /// Number of vCPUs that share the last-level cache.
    cache_vcpus: u32,
    max_phys_bits: u8,
    nested: bool,
    tsc_deadline: bool,
}

impl CpuidTemplate {
    /// Creates the template from the entries that KVM supports. The topology uses the maximum number of vCPUs, because a guest keeps the
    /// CPUID that it read first.
    pub fn new(kvm: &Kvm, cpus: &CpusConfig) -> Result<Self, KvmError> {
        let supported =
            kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(KvmError::call("read the supported CPUID"))?;
        let tsc_deadline = kvm.check_extension(Cap::TscDeadlineTimer);
        let CpusConfig { max_vcpus: vcpus, max_phys_bits, nested, .. } = *cpus;
        let entries = supported.as_slice().to_vec();
        Ok(Self { entries, vcpus, cache_vcpus: vcpus, max_phys_bits, nested, tsc_deadline })
    }

    /// Adapts the template so that vCPUs of different NUMA nodes share no cache, because Linux complains about a shared cache.
    pub fn with_nodes(self, nodes: &[NumaConfig]) -> Self {
        if nodes.is_empty() { self } else { Self { cache_vcpus: sharing_a_cache(self.vcpus, nodes), ..self } }
    }

    /// Returns the width of the guest's physical addresses in bits (leaf 0x8000_0008).
    pub fn physical_bits(&self) -> u8 {
        let leaf = self.entries.iter().find(|entry| entry.function == 0x8000_0008);
        let of_host = leaf.map_or(36, |entry| entry.eax.to_le_bytes()[0]).clamp(32, 52);
        of_host.min(self.max_phys_bits)
    }

    /// Returns the entries of vCPU `id`. `id` is also the vCPU's APIC ID.
    pub fn for_vcpu(&self, id: u32) -> Result<CpuId, KvmError> {
        let mut entries = self.entries.clone();
        entries.retain(|entry| !matches!(entry.function, 0xb | 0x1f));
        let max_leaf = entries.iter().find(|entry| entry.function == 0).map_or(0, |entry| entry.eax);
        if max_leaf >= 0xb {
            entries.extend(topology_leaves(self.vcpus));
        }
        for entry in &mut entries {
            self.adapt(entry);
        }
        let of_any = CpuId::from_entries(&entries).map_err(|_| {
            let reason =
                format!("the table has {} entries, but KVM allows at most {KVM_MAX_CPUID_ENTRIES}", entries.len());
            KvmError::other(format!("set the CPUID table of vCPU {id}"), reason)
        })?;
        Ok(of_vcpu(&of_any, id))
    }

    fn adapt(&self, entry: &mut kvm_cpuid_entry2) {
        let logical = self.vcpus.min(255);
        match entry.function {
            1 => {
                entry.ebx = (entry.ebx & 0x0000_ffff) | (logical << 16);
                entry.ecx |= HYPERVISOR | if self.tsc_deadline { TSC_DEADLINE } else { 0 };
                if !self.nested {
                    entry.ecx &= !VMX;
                }
                entry.edx = if self.vcpus > 1 { entry.edx | HTT } else { entry.edx & !HTT };
            }
            // Intel's cache leaves. In EAX, bits 26 to 31 are the number of other cores in the package. Bits 14 to 25 are the number of
            // other vCPUs that share the cache.
            4 => {
                let shared = self.shared(entry.eax);
                entry.eax = (entry.eax & 0x3fff) | (shared << 14) | ((logical - 1).min(63) << 26);
            }
            // AMD's cache leaves. Bits 14 to 25 are as in Intel's leaves, and bits 26 to 31 are reserved. A leaf of type 0 ends the list.
            0x8000_001d if entry.eax & 0x1f != 0 => {
                entry.eax = (entry.eax & !(0xfff << 14)) | (self.shared(entry.eax) << 14);
            }
            0x8000_0001 if !self.nested => entry.ecx &= !SVM,
            0x8000_0008 => {
                // Widths of physical addresses, of linear addresses, and of a nested guest's physical addresses. If the last width is 0, it
                // equals the first width.
                let [physical, linear, of_guests, rest] = entry.eax.to_le_bytes();
                let most = self.max_phys_bits;
                entry.eax = u32::from_le_bytes([physical.min(most), linear, of_guests.min(most), rest]);
                // AMD: number of cores minus one, and the width of the APIC ID's core part.
                entry.ecx = (logical - 1) | (id_bits(self.vcpus) << 12);
            }
            // AMD: the package is one node.
            0x8000_001e => (entry.ebx, entry.ecx) = (0, 0),
            _ => {}
        }
    }

    /// Returns the number of other vCPUs that share a cache. `cache` is EAX of the cache's leaf, with the level in bits 5 to 7. vCPUs share
    /// only caches of level 3 and above.
    fn shared(&self, cache: u32) -> u32 {
        if (cache >> 5) & 7 >= 3 { self.cache_vcpus.min(255) - 1 } else { 0 }
    }
}

/// Returns the largest number of vCPUs that can share a cache if no cache may be shared between nodes. A guest assumes that vCPUs share a
/// cache if their APIC IDs differ only in the last bits.
fn sharing_a_cache(vcpus: u32, nodes: &[NumaConfig]) -> u32 {
    let node = |vcpu: u32| nodes.iter().position(|node| node.cpus.contains(&vcpu));
    // vCPUs without a node do not share a cache with vCPUs in a node.
    let fits = |bits: &u32| (0..vcpus).all(|vcpu| node(vcpu >> bits << bits) == node(vcpu));
    let bits = (0..=id_bits(vcpus)).rev().find(fits).unwrap_or(0);
    vcpus.min(1 << bits)
}

/// Returns the entries of vCPU `id`, made from the entries `cpuid` of another vCPU. The result differs from `cpuid` only in the fields that
/// contain the APIC ID, which is `id`.
pub fn of_vcpu(cpuid: &CpuId, id: u32) -> CpuId {
    let mut cpuid = cpuid.clone();
    for entry in cpuid.as_mut_slice() {
        match entry.function {
            1 => entry.ebx = (entry.ebx & 0x00ff_ffff) | (id << 24),
            0xb => entry.edx = id,
            // AMD: extended APIC ID, and the number of the compute unit. Each thread is its own compute unit.
            0x8000_001e => (entry.eax, entry.ebx) = (id, (entry.ebx & !0xff) | (id & 0xff)),
            _ => {}
        }
    }
    cpuid
}

/// Returns how many bits of the APIC ID identify the core in the package.
fn id_bits(vcpus: u32) -> u32 {
    vcpus.next_power_of_two().trailing_zeros()
}

/// Returns the extended topology leaf 0xb: one thread per core, all cores in one package.
fn topology_leaves(vcpus: u32) -> [kvm_cpuid_entry2; 3] {
    // KVM_CPUID_FLAG_SIGNIFICANT_INDEX: the entry applies only to its index.
    let leaf = |index, eax, ebx, kind: u32| kvm_cpuid_entry2 {
        function: 0xb,
        index,
        flags: 1,
        eax,
        ebx,
        ecx: index | kind,
        ..Default::default()
    };
    [leaf(0, 0, 1, LEVEL_SMT), leaf(1, id_bits(vcpus), vcpus, LEVEL_CORE), leaf(2, 0, 0, 0)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(vcpus: u32) -> CpuidTemplate {
        let leaf = |function| kvm_cpuid_entry2 { function, eax: 0xd, ..Default::default() };
        let mut entries: Vec<_> = [0, 1, 4, 0xb, 0x8000_0001, 0x8000_0008, 0x8000_001e].into_iter().map(leaf).collect();
        (entries[1].ecx, entries[4].ecx) = (VMX, SVM);
        entries[5].eax = 0x0034_3034;
        CpuidTemplate { entries, vcpus, cache_vcpus: vcpus, max_phys_bits: 46, nested: true, tsc_deadline: true }
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
            // A vCPU that is added later gets the same entries as at boot.
            assert_eq!(of_vcpu(&template.for_vcpu((id + 1) % 3).unwrap(), id).as_slice(), cpuid.as_slice());
        }
    }

    #[test]
    fn features_that_kvm_emulates_are_added() {
        let cpuid = template(1).for_vcpu(0).unwrap();
        assert_eq!(find(&cpuid, 1, 0).ecx, VMX | HYPERVISOR | TSC_DEADLINE);
        assert_eq!(find(&cpuid, 1, 0).edx & HTT, 0);
    }

    /// Returns how many other vCPUs share each cache level. The host's entries describe an AMD or Intel processor with two threads per
    /// core.
    fn shared(function: u32, template: CpuidTemplate) -> Vec<u32> {
        let caches = [(1, 1), (2, 1), (3, 15)].into_iter().zip(0..);
        let mut entries: Vec<_> = caches
            .map(|((level, shared), index)| kvm_cpuid_entry2 {
                function,
                index,
                flags: 1,
                eax: (3 << 26) | (shared << 14) | (level << 5) | 1,
                ..Default::default()
            })
            .collect();
        // End of the cache leaves.
        entries.push(kvm_cpuid_entry2 { function, index: 3, flags: 1, ..Default::default() });
        let cpuid = CpuidTemplate { entries, ..template }.for_vcpu(0).unwrap();
        if function == 0x8000_001d {
            assert_eq!(find(&cpuid, function, 3).eax, 0);
            assert_eq!(find(&cpuid, function, 2).eax, (3 << 26) | (find(&cpuid, function, 2).eax & 0x03ff_c000) | 0x61);
        }
        (0..3).map(|index| (find(&cpuid, function, index).eax >> 14) & 0xfff).collect()
    }

    #[test]
    fn only_the_last_level_cache_is_shared_by_vcpus() {
        for leaf in [4, 0x8000_001d] {
            assert_eq!(shared(leaf, template(4)), [0, 0, 3], "{leaf:#x}");
            assert_eq!(shared(leaf, template(1)), [0, 0, 0], "{leaf:#x}");
        }
    }

    #[test]
    fn vcpus_of_two_nodes_share_no_cache() {
        let last = |vcpus, nodes: &[&[u32]]| {
            let nodes: Vec<_> =
                nodes.iter().map(|cpus| NumaConfig { cpus: cpus.to_vec(), ..NumaConfig::default() }).collect();
            let of = |leaf| shared(leaf, template(vcpus).with_nodes(&nodes))[2];
            assert_eq!(of(4), of(0x8000_001d));
            of(4)
        };
        assert_eq!(last(4, &[]), 3);
        assert_eq!(last(4, &[&[0, 1, 2, 3]]), 3);
        assert_eq!(last(6, &[&[0, 1, 2, 3, 4, 5], &[]]), 5);
        assert_eq!(last(4, &[&[0, 1], &[2, 3]]), 1);
        assert_eq!(last(6, &[&[0, 1, 2, 3], &[5, 4]]), 3);
        // vCPUs that share a cache have numbers that differ only in the last bits.
        assert_eq!(last(6, &[&[0, 1, 2], &[3, 4, 5]]), 0);
        assert_eq!(last(4, &[&[0, 2], &[1, 3]]), 0);
        // vCPUs without a node do not change the caches of vCPUs in a node.
        assert_eq!((last(4, &[&[0, 1], &[]]), last(8, &[&[0, 1, 2, 3]])), (1, 3));
        assert_eq!(last(4, &[&[0, 1, 2]]), 0);
    }

    #[test]
    fn physical_address_width_is_the_hosts_up_to_the_configured() {
        let width = |most| {
            let template = CpuidTemplate { max_phys_bits: most, ..template(1) };
            let eax = find(&template.for_vcpu(0).unwrap(), 0x8000_0008, 0).eax;
            (template.physical_bits(), eax.to_le_bytes())
        };
        assert_eq!(width(52), (52, [52, 48, 52, 0]));
        assert_eq!(width(46), (46, [46, 48, 46, 0]));
        let mut narrow = template(1);
        narrow.entries[5].eax = 0x3028;
        assert_eq!(narrow.physical_bits(), 40);
        assert_eq!(find(&narrow.for_vcpu(0).unwrap(), 0x8000_0008, 0).eax, 0x3028);
    }

    #[test]
    fn guest_without_nesting_has_no_virtualization_features() {
        let features = |nested| {
            let cpuid = CpuidTemplate { nested, ..template(1) }.for_vcpu(0).unwrap();
            (find(&cpuid, 1, 0).ecx & VMX, find(&cpuid, 0x8000_0001, 0).ecx & SVM)
        };
        assert_eq!((features(true), features(false)), ((VMX, SVM), (0, 0)));
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! CPUID in a snapshot. A guest reads CPUID once and relies on it, so a restored guest needs all saved features.

use carom_api::limits::PHYS_BITS;
use devices::state::StateError;
use kvm_bindings::{CpuId, kvm_cpuid_entry2};
use serde::{Deserialize, Serialize};

/// CPUID of one vCPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(Default))]
pub(super) struct SavedCpuid(Vec<Entry>);

/// Entry in KVM's format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    function: u32,
    index: u32,
    flags: u32,
    eax: u32,
    ebx: u32,
    ecx: u32,
    edx: u32,
}

impl From<&kvm_cpuid_entry2> for Entry {
    fn from(entry: &kvm_cpuid_entry2) -> Self {
        let kvm_cpuid_entry2 { function, index, flags, eax, ebx, ecx, edx, .. } = *entry;
        Self { function, index, flags, eax, ebx, ecx, edx }
    }
}

impl From<Entry> for kvm_cpuid_entry2 {
    fn from(entry: Entry) -> Self {
        let Entry { function, index, flags, eax, ebx, ecx, edx } = entry;
        Self { function, index, flags, eax, ebx, ecx, edx, ..Default::default() }
    }
}

/// Result register of CPUID.
#[derive(Clone, Copy, Debug)]
enum Register {
    Eax,
    Ebx,
    Ecx,
    Edx,
}

impl Entry {
    fn get(&self, register: Register) -> u32 {
        match register {
            Register::Eax => self.eax,
            Register::Ebx => self.ebx,
            Register::Ecx => self.ecx,
            Register::Edx => self.edx,
        }
    }
}

/// Registers of feature bits: function, index, register, and the bits that are not features but change with the guest's
/// actions (`OSXSAVE`, `APIC`, `MWAIT`, `OSPKE`).
const FEATURES: [(u32, u32, Register, u32); 17] = [
    (1, 0, Register::Ecx, 1 << 27 | 1 << 3),
    (1, 0, Register::Edx, 1 << 9),
    (7, 0, Register::Ebx, 0),
    (7, 0, Register::Ecx, 1 << 4),
    (7, 0, Register::Edx, 0),
    (7, 1, Register::Eax, 0),
    (7, 1, Register::Edx, 0),
    (7, 2, Register::Edx, 0),
    (0xd, 0, Register::Eax, 0),
    (0xd, 0, Register::Edx, 0),
    (0xd, 1, Register::Eax, 0),
    (0x4000_0001, 0, Register::Eax, 0),
    (0x8000_0001, 0, Register::Ecx, 0),
    (0x8000_0001, 0, Register::Edx, 0),
    (0x8000_0007, 0, Register::Edx, 0),
    (0x8000_0008, 0, Register::Ebx, 0),
    (0x8000_000a, 0, Register::Edx, 0),
];

/// Leaf with the width of physical addresses.
const SIZES: u32 = 0x8000_0008;

impl SavedCpuid {
    /// Saves the CPUID of a vCPU.
    pub(super) fn new(cpuid: &CpuId) -> Self {
        Self(cpuid.as_slice().iter().map(Entry::from).collect())
    }

    fn find(&self, function: u32, index: u32) -> Option<&Entry> {
        self.0.iter().find(|entry| entry.function == function && entry.index == index)
    }

    /// Returns the width of physical addresses in bits.
    pub(super) fn physical_bits(&self) -> Option<u8> {
        self.find(SIZES, 0).map(|entry| entry.eax.to_le_bytes()[0])
    }

    /// Returns the saved CPUID in KVM's format, if this host supports everything in the saved CPUID. `host` is the CPUID that a new vCPU of
    /// this host would get.
    ///
    /// # Errors
    /// The host's CPU has another vendor, lacks a feature or has narrower physical addresses, or the saved width of
    /// physical addresses is too small.
    pub(super) fn for_host(&self, host: &CpuId) -> Result<CpuId, StateError> {
        let host = Self::new(host);
        let vendor = |cpuid: &Self| cpuid.find(0, 0).map(|entry| (entry.ebx, entry.edx, entry.ecx));
        if vendor(self) != vendor(&host) {
            return Err(StateError::rule(
                "cpuid",
                "the guest's CPU has another vendor than this host's: restore the VM on a host with a CPU of the guest's vendor",
            ));
        }
        for (function, index, register, not_features) in FEATURES {
            let of = |cpuid: &Self| cpuid.find(function, index).map_or(0, |entry| entry.get(register));
            let missing = of(self) & !of(&host) & !not_features;
            if missing != 0 {
                let field = format!("cpuid: leaf {function:#x}, subleaf {index}, {register:?}");
                let rule = format!(
                    "this host's CPU or KVM lacks features that the guest uses (bits {missing:#x}): restore the VM on a host with these features"
                );
                return Err(StateError::rule(field, rule));
            }
        }
        if self.physical_bits() > host.physical_bits() {
            let bits = |cpuid: &Self| cpuid.physical_bits().unwrap_or(36);
            let rule = format!(
                "the guest's CPU has physical addresses of {} bits, but this host's has {}: restore the VM on a host with wider addresses",
                bits(self),
                bits(&host)
            );
            return Err(StateError::rule("cpuid", rule));
        }
        // A width below the minimum is rejected, because the VMM computes the guest-physical address map from the saved width.
        let least = host.physical_bits().map_or(*PHYS_BITS.start(), |bits| bits.min(*PHYS_BITS.start()));
        if let Some(bits) = self.physical_bits().filter(|bits| *bits < least) {
            let rule = format!(
                "the guest's CPU has physical addresses of {bits} bits, but the minimum is {least}: restore from an unmodified snapshot"
            );
            return Err(StateError::rule("cpuid", rule));
        }
        let entries: Vec<kvm_cpuid_entry2> = self.0.iter().map(|entry| (*entry).into()).collect();
        CpuId::from_entries(&entries).map_err(|_| {
            StateError::rule(
                "cpuid",
                "the saved CPUID has more entries than KVM allows: restore from an unmodified snapshot",
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpuid(change: impl Fn(&mut Vec<kvm_cpuid_entry2>)) -> CpuId {
        let leaf = |function| kvm_cpuid_entry2 { function, ..Default::default() };
        let mut entries: Vec<_> = [0, 1, 7, SIZES].into_iter().map(leaf).collect();
        entries[0].ebx = 0x6874_7541;
        entries[2].ebx = 0b101;
        entries[3].eax = 0x3028;
        change(&mut entries);
        CpuId::from_entries(&entries).unwrap()
    }

    fn refusal(guest: impl Fn(&mut Vec<kvm_cpuid_entry2>)) -> String {
        SavedCpuid::new(&cpuid(guest)).for_host(&cpuid(|_| {})).unwrap_err().to_string()
    }

    #[test]
    fn guest_keeps_its_cpuid_if_the_host_supports_it() {
        let guest = cpuid(|entries| {
            entries[2].ebx = 0b001;
            entries[1].ecx = 1 << 27;
        });
        let saved = SavedCpuid::new(&guest);
        let text = serde_json::to_string(&saved).unwrap();
        let read: SavedCpuid = serde_json::from_str(&text).unwrap();
        assert_eq!(read, saved);
        assert_eq!(read.for_host(&cpuid(|_| {})).unwrap(), guest);
        assert_eq!(read.physical_bits(), Some(0x28));
    }

    #[test]
    fn missing_host_features_are_named() {
        let feature = refusal(|entries| entries[2].ebx = 0b111);
        assert_eq!(
            feature,
            "cpuid: leaf 0x7, subleaf 0, Ebx: this host's CPU or KVM lacks features that the guest uses (bits 0x2): restore the VM on a host with these features"
        );
        assert!(refusal(|entries| entries[3].eax = 0x3030).contains("48 bits, but this host's has 40"));
        assert!(refusal(|entries| entries[0].ebx = 0).contains("another vendor"));
    }

    #[test]
    fn saved_width_below_36_bits_is_refused_unless_the_hosts() {
        let rule = |bits: u8| {
            format!(
                "cpuid: the guest's CPU has physical addresses of {bits} bits, but the minimum is 36: restore from an unmodified snapshot"
            )
        };
        for bits in [0, 8, 29, 35] {
            assert_eq!(refusal(|entries| entries[3].eax = 0x3000 | u32::from(bits)), rule(bits));
        }
        let on_host = |guest: u32, host: u32| {
            let saved = SavedCpuid::new(&cpuid(|entries| entries[3].eax = guest));
            saved.for_host(&cpuid(|entries| entries[3].eax = host)).map(drop).map_err(|error| error.to_string())
        };
        assert_eq!((on_host(36, 40), on_host(32, 32), on_host(33, 32).is_err()), (Ok(()), Ok(()), true));
        assert!(on_host(31, 32).unwrap_err().ends_with("the minimum is 32: restore from an unmodified snapshot"));
    }
}

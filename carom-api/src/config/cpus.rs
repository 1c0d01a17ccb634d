// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The guest's CPUs.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{CpuAffinity, MemoryConfig};
use crate::error::{ConfigError, ensure};
use crate::field::{Field, keys};
use crate::left_out::yes;
use crate::limits::{MAX_PHYS_BITS, MAX_VCPUS, PHYS_BITS, ROOM_BESIDE_RAM};
use crate::object;
use crate::option_list::{FromOption, OptionList, Special, defaults, from_str};

/// Default number of vCPUs.
const DEFAULT_VCPUS: u32 = 1;

/// The guest's CPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CpusConfig {
    /// Number of vCPUs at boot, 1 to 254.
    #[schema(minimum = 1, maximum = 254)]
    pub boot_vcpus: u32,
    /// Maximum number of vCPUs that `vm.resize` can set while the guest runs: `boot_vcpus` to 254. 0 stands for `boot_vcpus`.
    #[serde(default)]
    #[schema(maximum = 254)]
    pub max_vcpus: u32,
    /// Topology of all `max_vcpus` vCPUs. The only supported topology is the default: each vCPU is a core of the same package (`1:N:1:1`
    /// for N vCPUs).
    #[serde(default, deserialize_with = "object::or_null")]
    pub topology: Option<CpuTopology>,
    /// Maximum width of a guest-physical address in bits. The width is lower if the host supports fewer bits.
    #[serde(default = "default_max_phys_bits")]
    #[schema(minimum = 36, maximum = 52)]
    pub max_phys_bits: u8,
    /// True if the guest can run VMs itself. The host must allow nested virtualization.
    #[serde(default = "yes")]
    pub nested: bool,
    /// Host CPUs that each vCPU may run on. A vCPU without an entry may run on any CPU.
    #[serde(default, deserialize_with = "object::list_or_null")]
    pub affinity: Vec<CpuAffinity>,
}

/// Topology of the vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CpuTopology {
    /// Must be 1.
    #[schema(minimum = 1, maximum = 1)]
    pub threads_per_core: u16,
    /// Must be `max_vcpus`.
    #[schema(minimum = 1, maximum = 254)]
    pub cores_per_die: u16,
    /// Must be 1.
    #[schema(minimum = 1, maximum = 1)]
    pub dies_per_package: u16,
    /// Must be 1.
    #[schema(minimum = 1, maximum = 1)]
    pub packages: u16,
}

fn default_max_phys_bits() -> u8 {
    MAX_PHYS_BITS
}

impl CpusConfig {
    /// Option and JSON field of this configuration.
    pub const OPTION: Field = Field::new("--cpus", "cpus");
    /// [`Self::boot_vcpus`].
    pub const BOOT: Field = Self::OPTION.keys("boot", "boot_vcpus");
    /// [`Self::max_vcpus`].
    pub const MAX: Field = Self::OPTION.keys("max", "max_vcpus");
    keys! { TOPOLOGY = "topology", MAX_PHYS_BITS = "max_phys_bits", AFFINITY = "affinity" }

    /// Returns the default configuration with `count` vCPUs.
    pub fn with_count(count: u32) -> Self {
        Self { boot_vcpus: count, max_vcpus: count, ..Self::default() }
    }

    /// Sets `max_vcpus` to its default, `boot_vcpus`, if `max_vcpus` is 0.
    pub(crate) fn complete(&mut self) {
        if self.max_vcpus == 0 {
            self.max_vcpus = self.boot_vcpus;
        }
    }

    /// Checks all fields.
    ///
    /// # Errors
    /// - A number of vCPUs is out of range.
    /// - The topology is not one package of cores.
    /// - An affinity is wrong.
    /// - The address width is out of range, or too small for the RAM.
    pub fn check(&self, memory: &MemoryConfig) -> Result<(), ConfigError> {
        let Self { boot_vcpus: boot, max_vcpus: max, .. } = *self;
        ensure((1..=MAX_VCPUS).contains(&boot), Self::BOOT, || format!("{boot} is not between 1 and {MAX_VCPUS}"))?;
        ensure((boot..=MAX_VCPUS).contains(&max), Self::MAX, || {
            format!("{max} is not between {boot} (the vCPUs at boot) and {MAX_VCPUS}")
        })?;
        self.topology.map_or(Ok(()), |topology| topology.check(max))?;
        CpuAffinity::check_all(&self.affinity, Self::AFFINITY, max)?;
        self.check_phys_bits(memory)
    }

    /// Checks that guest-physical addresses are wide enough for all RAM, and for BARs above the RAM.
    fn check_phys_bits(&self, memory: &MemoryConfig) -> Result<(), ConfigError> {
        let (bits, ram) = (self.max_phys_bits, memory.total());
        let (least, most) = (PHYS_BITS.start(), PHYS_BITS.end());
        ensure(PHYS_BITS.contains(&bits), Self::MAX_PHYS_BITS, || format!("{bits} is not between {least} and {most}"))?;
        let fits = ram <= (1 << bits) - ROOM_BESIDE_RAM;
        ensure(fits, Self::MAX_PHYS_BITS, || {
            format!("{bits} bits are too few to address {ram} bytes of RAM: use more bits or less RAM")
        })
    }
}

impl CpuTopology {
    /// Checks that the topology is one package of `vcpus` cores.
    fn check(&self, vcpus: u32) -> Result<(), ConfigError> {
        let Self { threads_per_core, cores_per_die, dies_per_package, packages } = *self;
        ensure(
            (threads_per_core, dies_per_package, packages) == (1, 1, 1),
            CpusConfig::TOPOLOGY,
            || "vCPUs are cores of one package: threads_per_core, dies_per_package and packages must be 1",
        )?;
        ensure(u32::from(cores_per_die) == vcpus, CpusConfig::TOPOLOGY, || {
            format!("cores_per_die is {cores_per_die}, but must be {vcpus}, the maximum number of vCPUs")
        })
    }
}

impl Default for CpusConfig {
    fn default() -> Self {
        defaults()
    }
}

impl FromOption for CpusConfig {
    const OPTION: Field = Self::OPTION;
    const SPECIAL: &'static [Special] = &[
        Special::Name(Self::BOOT),
        Special::Rule("boot_vcpus", |text| {
            format!("'{text}' is not a number of CPUs: write a number from 1 to {MAX_VCPUS}")
        }),
        Special::Name(Self::MAX),
        Special::Rule("max_vcpus", |text| {
            format!("'{text}' is not a number of CPUs: write a number from 1 to {MAX_VCPUS}")
        }),
        Special::By("topology", &["topology"]),
        Special::Rule("max_phys_bits", |text| {
            format!("'{text}' is not a number of bits: write a number such as {MAX_PHYS_BITS}")
        }),
    ];

    fn prepare(list: &mut OptionList, _: &str) -> Result<(), ConfigError> {
        list.set_default("boot", DEFAULT_VCPUS.to_string());
        Ok(())
    }

    fn finish(&mut self, list: &OptionList) -> Result<(), ConfigError> {
        self.topology = list.get("topology").map(str::parse).transpose()?;
        if list.get("max").is_none() {
            self.max_vcpus = self.boot_vcpus;
        }
        Ok(())
    }
}
from_str!(CpusConfig);

impl FromStr for CpuTopology {
    type Err = ConfigError;

    /// Parses `THREADS:CORES:DIES:PACKAGES`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let numbers: Result<Vec<u16>, _> = text.split(':').map(str::parse).collect();
        match numbers.as_deref() {
            Ok(&[threads_per_core, cores_per_die, dies_per_package, packages]) => {
                Ok(Self { threads_per_core, cores_per_die, dies_per_package, packages })
            }
            _ => {
                let rule = format!("'{text}' must be four numbers THREADS:CORES:DIES:PACKAGES, such as 1:4:1:1");
                Err(ConfigError::new(CpusConfig::TOPOLOGY, rule))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::{GIB, MAX_MEMORY};

    fn refused(cpus: &CpusConfig, ram: u64) -> Option<Field> {
        cpus.check(&MemoryConfig::with_size(ram)).err().map(|error| error.field)
    }

    #[test]
    fn number_out_of_range_is_refused() {
        for count in [0, 255, u32::MAX] {
            assert_eq!(refused(&CpusConfig::with_count(count), GIB), Some(CpusConfig::BOOT));
        }
        for (max, outcome) in
            [(2, None), (4, None), (254, None), (1, Some(CpusConfig::MAX)), (255, Some(CpusConfig::MAX))]
        {
            let cpus = CpusConfig { max_vcpus: max, ..CpusConfig::with_count(2) };
            assert_eq!(refused(&cpus, GIB), outcome, "{max}");
        }
        assert_eq!(refused(&CpusConfig::with_count(254), GIB), None);
    }

    #[test]
    fn only_single_package_topology_matching_vcpus_is_accepted() {
        let with = |text: &str| CpusConfig { topology: Some(text.parse().unwrap()), ..CpusConfig::with_count(4) };
        assert_eq!(refused(&with("1:4:1:1"), GIB), None);
        for other in ["2:2:1:1", "1:2:2:1", "1:2:1:2", "1:1:1:1", "1:8:1:1", "0:0:0:0", "4:1:1:1"] {
            assert_eq!(refused(&with(other), GIB), Some(CpusConfig::TOPOLOGY), "{other}");
        }
    }

    #[test]
    fn invalid_affinity_is_refused_with_its_vcpu() {
        let check = |text: &str| {
            let cpus: CpusConfig = text.parse().unwrap();
            CpuAffinity::check_all(&cpus.affinity, CpusConfig::AFFINITY, 2).map_err(|error| error.to_string())
        };
        for (text, rule) in [
            ("[2@[0]]", "vCPU 2 does not exist: the last vCPU is 1"),
            ("[1@[0],1@[1]]", "vCPU 1 is given twice: list it once"),
            ("[0@[]]", "vCPU 0 has an empty list of host CPUs: name at least one"),
            ("[0@[1024]]", "vCPU 0 cannot run on host CPU 1024: the highest CPU number that Carom supports is 1023"),
        ] {
            assert_eq!(check(&format!("affinity={text}")), Err(format!("--cpus affinity: {rule}")));
        }
        assert_eq!(check("affinity=[1@[1023],0@[0,0]]"), Ok(()));
    }

    #[test]
    fn affinity_is_accepted_up_to_the_maximum_of_vcpus() {
        let cpus: CpusConfig = "boot=1,max=2,affinity=[1@[0,2]]".parse().unwrap();
        assert_eq!(refused(&cpus, GIB), None);
        let beyond = CpusConfig { max_vcpus: 1, ..cpus };
        assert_eq!(refused(&beyond, GIB), Some(CpusConfig::AFFINITY));
    }

    #[test]
    fn address_width_that_does_not_fit_all_ram_is_refused() {
        let with = |max_phys_bits| CpusConfig { max_phys_bits, ..CpusConfig::default() };
        assert_eq!(
            (refused(&with(36), 62 * GIB), refused(&with(46), MAX_MEMORY), refused(&with(52), GIB)),
            (None, None, None)
        );
        for (bits, ram) in [(0, GIB), (35, GIB), (53, GIB), (255, GIB), (36, 62 * GIB + 1), (39, MAX_MEMORY)] {
            assert_eq!(refused(&with(bits), ram), Some(CpusConfig::MAX_PHYS_BITS), "{bits}");
        }
    }
}

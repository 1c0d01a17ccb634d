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

/// vCPUs of a VM that does not say how many it has.
const DEFAULT_VCPUS: u32 = 1;

/// The guest's CPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CpusConfig {
    /// vCPUs at boot, 1 to 254.
    #[schema(minimum = 1, maximum = 254)]
    pub boot_vcpus: u32,
    /// Most vCPUs that `vm.resize` can give a guest that runs: `boot_vcpus` to 254. 0 stands for as many as at boot.
    #[serde(default)]
    #[schema(maximum = 254)]
    pub max_vcpus: u32,
    /// How all that there can be are grouped: as cores of one package, the same as without it.
    #[serde(default, deserialize_with = "object::or_null")]
    pub topology: Option<CpuTopology>,
    /// Most bits that a physical address has; fewer where the host has fewer.
    #[serde(default = "default_max_phys_bits")]
    #[schema(minimum = 36, maximum = 52)]
    pub max_phys_bits: u8,
    /// Whether the guest can run VMs, where the host allows it.
    #[serde(default = "yes")]
    pub nested: bool,
    /// The CPUs of the host that each of them runs on; any where nothing is said of it.
    #[serde(default, deserialize_with = "object::list_or_null")]
    pub affinity: Vec<CpuAffinity>,
}

/// How vCPUs are grouped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CpuTopology {
    /// 1.
    #[schema(minimum = 1, maximum = 1)]
    pub threads_per_core: u16,
    /// As many as there can be vCPUs.
    #[schema(minimum = 1, maximum = 254)]
    pub cores_per_die: u16,
    /// 1.
    #[schema(minimum = 1, maximum = 1)]
    pub dies_per_package: u16,
    /// 1.
    #[schema(minimum = 1, maximum = 1)]
    pub packages: u16,
}

fn default_max_phys_bits() -> u8 {
    MAX_PHYS_BITS
}

impl CpusConfig {
    /// The option.
    pub const OPTION: Field = Field::new("--cpus", "cpus");
    /// [`Self::boot_vcpus`].
    pub const BOOT: Field = Self::OPTION.keys("boot", "boot_vcpus");
    /// [`Self::max_vcpus`].
    pub const MAX: Field = Self::OPTION.keys("max", "max_vcpus");
    keys! { TOPOLOGY = "topology", MAX_PHYS_BITS = "max_phys_bits", AFFINITY = "affinity" }

    /// `count` vCPUs and nothing special.
    pub fn with_count(count: u32) -> Self {
        Self { boot_vcpus: count, max_vcpus: count, ..Self::default() }
    }

    /// Fills in what follows from the rest.
    pub(crate) fn complete(&mut self) {
        if self.max_vcpus == 0 {
            self.max_vcpus = self.boot_vcpus;
        }
    }

    /// Checks the numbers.
    ///
    /// # Errors
    /// There are too many or none, fewer than at boot, or they are grouped; one is to run nowhere; or addresses have too few or too
    /// many bits.
    pub fn check(&self, memory: &MemoryConfig) -> Result<(), ConfigError> {
        let Self { boot_vcpus: boot, max_vcpus: max, .. } = *self;
        ensure((1..=MAX_VCPUS).contains(&boot), Self::BOOT, || format!("{boot} is not in 1 to {MAX_VCPUS}"))?;
        ensure((boot..=MAX_VCPUS).contains(&max), Self::MAX, || {
            format!("{max} is not in {boot}, those at boot, to {MAX_VCPUS}")
        })?;
        self.topology.map_or(Ok(()), |topology| topology.check(max))?;
        CpuAffinity::check_all(&self.affinity, Self::AFFINITY, max)?;
        self.check_phys_bits(memory)
    }

    /// Checks that all RAM has an address, and something is left for BARs behind it.
    fn check_phys_bits(&self, memory: &MemoryConfig) -> Result<(), ConfigError> {
        let (bits, ram) = (self.max_phys_bits, memory.total());
        let (least, most) = (PHYS_BITS.start(), PHYS_BITS.end());
        ensure(PHYS_BITS.contains(&bits), Self::MAX_PHYS_BITS, || format!("{bits} is not in {least} to {most}"))?;
        let fits = ram <= (1 << bits) - ROOM_BESIDE_RAM;
        ensure(fits, Self::MAX_PHYS_BITS, || format!("{bits} bits are too few for {ram} bytes of RAM"))
    }
}

impl CpuTopology {
    /// Checks that it is what a guest of `vcpus` vCPUs sees.
    fn check(&self, vcpus: u32) -> Result<(), ConfigError> {
        let Self { threads_per_core, cores_per_die, dies_per_package, packages } = *self;
        ensure(
            (threads_per_core, dies_per_package, packages) == (1, 1, 1),
            CpusConfig::TOPOLOGY,
            || "vCPUs are cores of one package: threads_per_core, dies_per_package and packages must be 1",
        )?;
        ensure(u32::from(cores_per_die) == vcpus, CpusConfig::TOPOLOGY, || {
            format!("cores_per_die is {cores_per_die}, but there can be {vcpus} vCPUs")
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
        Special::Rule("boot_vcpus", |text| format!("'{text}' is no number of CPUs")),
        Special::Name(Self::MAX),
        Special::Rule("max_vcpus", |text| format!("'{text}' is no number of CPUs")),
        Special::By("topology", &["topology"]),
        Special::Rule("max_phys_bits", |text| format!("'{text}' is no number of bits")),
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
                let rule = format!("'{text}' is not THREADS:CORES:DIES:PACKAGES, four numbers");
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
    fn affinity_that_cannot_be_is_refused_with_its_vcpu() {
        let check = |text: &str| {
            let cpus: CpusConfig = text.parse().unwrap();
            CpuAffinity::check_all(&cpus.affinity, CpusConfig::AFFINITY, 2).map_err(|error| error.to_string())
        };
        for (text, rule) in [
            ("[2@[0]]", "there is no vCPU 2: the last is 1"),
            ("[1@[0],1@[1]]", "vCPU 1 is given twice"),
            ("[0@[]]", "vCPU 0 has no CPU of the host to run on"),
            ("[0@[1024]]", "vCPU 0 is to run on CPU 1024 of the host, but numbers go to 1023"),
        ] {
            assert_eq!(check(&format!("affinity={text}")), Err(format!("--cpus affinity: {rule}")));
        }
        assert_eq!(check("affinity=[1@[1023],0@[0,0]]"), Ok(()));
    }

    #[test]
    fn cpus_of_the_host_are_for_vcpus_that_there_can_be() {
        let cpus: CpusConfig = "boot=1,max=2,affinity=[1@[0,2]]".parse().unwrap();
        assert_eq!(refused(&cpus, GIB), None);
        let beyond = CpusConfig { max_vcpus: 1, ..cpus };
        assert_eq!(refused(&beyond, GIB), Some(CpusConfig::AFFINITY));
    }

    #[test]
    fn addresses_that_do_not_reach_all_ram_are_refused() {
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

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The guest's RAM.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::MemoryZoneConfig;
use crate::error::{ConfigError, ensure, ensure_in_terms};
use crate::field::{Field, keys};
use crate::left_out::yes;
use crate::limits::{GIB, MAX_MEMORY, MEMORY_GRANULE, MIB, MIN_MEMORY};
use crate::object;
use crate::option_list::{FromOption, OptionList, Special, defaults, from_str};

/// Default RAM size in bytes.
const DEFAULT_SIZE: u64 = 512 * MIB;

/// The guest's RAM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MemoryConfig {
    /// RAM size in bytes, a multiple of 2 MiB. Must be 0 if the RAM consists of zones.
    #[schema(minimum = 0, maximum = 549_755_813_888_u64, multiple_of = 2_097_152)]
    pub size: u64,
    /// True if the RAM is a memfd, which other processes can map. Otherwise the RAM is private to the VMM.
    #[serde(default)]
    pub shared: bool,
    /// True if the RAM consists of the host's reserved huge pages (hugetlb). The RAM is then always a memfd.
    #[serde(default)]
    pub hugepages: bool,
    /// Huge page size in bytes: 2 MiB (default) or 1 GiB. Requires `hugepages`. `size` must be a multiple of this size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hugepage_size: Option<u64>,
    /// True if the VMM requests transparent huge pages from the host. Has no effect with `hugepages`.
    #[serde(default = "yes")]
    pub thp: bool,
    /// True if the host allocates all RAM when the VM is built. Otherwise the host allocates each page on first access.
    #[serde(default)]
    pub prefault: bool,
    /// True if the host may merge identical pages of the RAM (KSM). Must be off if other processes can map the RAM.
    #[serde(default)]
    pub mergeable: bool,
    /// Maximum bytes that `vm.resize` can add to a running guest by ACPI hotplug. The limit is lower if the guest-physical address
    /// space ends earlier, or if the RAM would exceed 512 GiB.
    #[serde(default)]
    pub hotplug_size: u64,
    /// True if the host must reserve memory for all RAM when the VM is built. If the host cannot, the boot fails. For shared RAM, the host
    /// also allocates all memory when the VM is built.
    #[serde(default)]
    pub reserve: bool,
    /// Zones that the RAM consists of. Each zone has its own memory settings.
    #[serde(default, deserialize_with = "object::list_or_null")]
    pub zones: Vec<MemoryZoneConfig>,
}

impl MemoryConfig {
    /// Option and JSON field of this configuration.
    pub const OPTION: Field = Field::new("--memory", "memory");
    keys! {
        SIZE = "size", SHARED = "shared", HUGEPAGE_SIZE = "hugepage_size", HOTPLUG_SIZE = "hotplug_size",
        MERGEABLE = "mergeable",
    }

    /// [`Self::zones`].
    pub const ZONES: Field = MemoryZoneConfig::OPTION;

    /// Returns the default configuration with `size` bytes.
    pub fn with_size(size: u64) -> Self {
        Self { size, ..Self::default() }
    }

    /// Total RAM of the guest in bytes.
    pub fn total(&self) -> u64 {
        self.zones.iter().fold(self.size, |sum, zone| sum.saturating_add(zone.size))
    }

    /// Returns a copy with `bytes` bytes of RAM at boot, without hot-plugged RAM. If the RAM consists of zones, the copy keeps the sizes of
    /// all zones.
    pub fn booted_with(&self, bytes: u64) -> Self {
        let size = if self.zones.is_empty() { bytes } else { self.size };
        Self { size, ..self.clone() }
    }

    /// Zones that the RAM consists of. If no zones are configured, the RAM is one zone.
    pub fn all_zones(&self) -> Vec<MemoryZoneConfig> {
        if !self.zones.is_empty() {
            return self.zones.clone();
        }
        vec![MemoryZoneConfig {
            id: "mem0".into(),
            size: self.size,
            file: None,
            shared: self.shared,
            hugepages: self.hugepages,
            hugepage_size: self.hugepage_size,
            host_numa_node: None,
            prefault: self.prefault,
            reserve: self.reserve,
            mergeable: self.mergeable,
        }]
    }

    /// Size of a huge page in bytes.
    fn huge_page(&self) -> u64 {
        self.hugepage_size.unwrap_or(2 * MIB)
    }

    /// True if other processes can map all of the RAM.
    pub fn can_be_shared(&self) -> bool {
        if self.zones.is_empty() {
            return self.shared || self.hugepages;
        }
        self.zones.iter().all(MemoryZoneConfig::can_be_shared)
    }

    /// Checks the size of the RAM, and the combination of the options.
    ///
    /// # Errors
    /// The size is too small, too large or not a multiple of its granule, or the options cannot be combined.
    pub fn check(&self) -> Result<(), ConfigError> {
        if !self.zones.is_empty() {
            self.check_beside_zones()?;
            MemoryZoneConfig::check_all(&self.zones)?;
        }
        let (size, page) = (self.total(), self.huge_page());
        ensure(size >= MIN_MEMORY, Self::SIZE, || {
            format!("{size} bytes are too few: the minimum is {}M", MIN_MEMORY / MIB)
        })?;
        ensure(size <= MAX_MEMORY, Self::SIZE, || {
            format!("{size} bytes are too many: the maximum is {}G", MAX_MEMORY >> 30)
        })?;
        let is_whole = size.is_multiple_of(MEMORY_GRANULE);
        ensure(is_whole, Self::SIZE, || format!("{size} bytes are not a multiple of {}M", MEMORY_GRANULE / MIB))?;
        let is_huge = !self.hugepages || size.is_multiple_of(page);
        ensure(is_huge, Self::SIZE, || {
            format!("{size} bytes are not a multiple of the huge page size of {page} bytes")
        })?;
        let is_used = self.hugepages || self.hugepage_size.is_none();
        ensure(is_used, Self::HUGEPAGE_SIZE, || "needs hugepages to be on")?;
        ensure([2 * MIB, GIB].contains(&page), Self::HUGEPAGE_SIZE, || format!("{page} is neither 2M nor 1G"))?;
        ensure(
            !self.mergeable || !self.can_be_shared(),
            Self::MERGEABLE,
            || "must be off if shared or hugepages is on: the host merges only private pages",
        )
    }

    /// If the RAM consists of zones, checks that `--memory` sets no field that must be set for each zone instead.
    fn check_beside_zones(&self) -> Result<(), ConfigError> {
        let said = [
            ("size", self.size != 0),
            ("shared", self.shared),
            ("hugepages", self.hugepages),
            ("hugepage_size", self.hugepage_size.is_some()),
            ("prefault", self.prefault),
            ("mergeable", self.mergeable),
            ("reserve", self.reserve),
        ];
        for (key, said) in said {
            ensure_in_terms(!said, Self::OPTION.key(key), |terms| {
                let off = if key == "size" { "must be 0" } else { "must be left out" };
                format!("{off} with {}: set {key} for each zone instead", Self::ZONES.name(terms))
            })?;
        }
        ensure_in_terms(self.hotplug_size == 0, Self::HOTPLUG_SIZE, |terms| {
            format!("must be 0 with {}: zones cannot grow", Self::ZONES.name(terms))
        })
    }
}

impl Default for MemoryConfig {
    fn default() -> Self {
        defaults()
    }
}

impl FromOption for MemoryConfig {
    const OPTION: Field = Self::OPTION;
    const SPECIAL: &'static [Special] = &[Special::By("zones", &[])];

    fn prepare(list: &mut OptionList, _: &str) -> Result<(), ConfigError> {
        list.set_default("size", DEFAULT_SIZE.to_string());
        Ok(())
    }
}
from_str!(MemoryConfig);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Explain;
    use crate::field::Terms;

    #[test]
    fn ram_size_out_of_range_or_granule_is_refused() {
        for size in [0, MIB, 31 * MIB, 33 * MIB, 512 * MIB + 1, !(2 * MIB - 1)] {
            assert_eq!(MemoryConfig::with_size(size).check().unwrap_err().field, MemoryConfig::SIZE, "{size}");
        }
        let plain = MemoryConfig::with_size(MAX_MEMORY);
        assert_eq!((plain.check(), plain.can_be_shared()), (Ok(()), false));
    }

    #[test]
    fn invalid_page_options_are_refused() {
        let refused = |text: &str| text.parse::<MemoryConfig>().unwrap().check().unwrap_err().to_string();
        assert_eq!(refused("size=64M,hugepage_size=2M"), "--memory hugepage_size: needs hugepages to be on");
        let odd = refused("size=64M,hugepages=on,hugepage_size=4M");
        assert_eq!(odd, "--memory hugepage_size: 4194304 is neither 2M nor 1G");
        let cut = refused("size=64M,hugepages=on,hugepage_size=1G");
        assert_eq!(cut, "--memory size: 67108864 bytes are not a multiple of the huge page size of 1073741824 bytes");
        assert!(refused("size=64M,shared=on,mergeable=on").starts_with("--memory mergeable: must be off if shared"));
    }

    #[test]
    fn memory_options_are_refused_if_there_are_zones() {
        let zones: Vec<MemoryZoneConfig> =
            ["id=a,size=64M,shared=on", "id=b,size=32M"].map(|zone| zone.parse().unwrap()).into();
        let of = |text: &str| MemoryConfig { zones: zones.clone(), ..text.parse().unwrap() };
        let memory = of("size=0");
        assert_eq!((memory.check(), memory.total(), memory.can_be_shared()), (Ok(()), 96 * MIB, false));
        assert_eq!(memory.all_zones(), zones);
        for key in ["shared=on", "hugepages=on", "prefault=on", "mergeable=on", "reserve=on"] {
            let refused = of(&format!("size=0,{key}")).check().unwrap_err().to_string();
            let name = key.trim_end_matches("=on");
            assert_eq!(
                refused,
                format!("--memory {name}: must be left out with --memory-zone: set {name} for each zone instead")
            );
        }
        assert!(of("size=64M").check().unwrap_err().to_string().starts_with("--memory size: must be 0 with"));
        let grows = of("size=0,hotplug_size=1G").check().unwrap_err().explain(Terms::Json);
        assert_eq!(grows, "memory.hotplug_size: must be 0 with memory.zones: zones cannot grow");
        let little = MemoryConfig { zones: zones[1..].to_vec(), ..of("size=0") };
        assert_eq!(little.check(), Ok(()));
        assert_eq!(MemoryConfig { zones: vec![], ..of("size=0") }.check().unwrap_err().field, MemoryConfig::SIZE);
    }
}

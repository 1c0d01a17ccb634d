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

/// Bytes of RAM of a VM that does not say how many it has.
const DEFAULT_SIZE: u64 = 512 * MIB;

/// The guest's RAM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MemoryConfig {
    /// Bytes, a multiple of 2 MiB, or 0 where there are zones.
    #[schema(minimum = 0, maximum = 549_755_813_888_u64, multiple_of = 2_097_152)]
    pub size: u64,
    /// Other processes can map it (a memfd), as opposed to memory of this process alone.
    #[serde(default)]
    pub shared: bool,
    /// It is made of the host's reserved huge pages of 2 MiB (always as a memfd).
    #[serde(default)]
    pub hugepages: bool,
    /// Bytes of one of these: 2 MiB or 1 GiB, of which `size` is a multiple; 2 MiB unless said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hugepage_size: Option<u64>,
    /// The host is asked for transparent huge pages. Of no meaning with `hugepages`.
    #[serde(default = "yes")]
    pub thp: bool,
    /// The host gives all of it when the VM is built, and not each page when it is touched first.
    #[serde(default)]
    pub prefault: bool,
    /// The host may keep pages of it that are the same as others once (KSM), where no other process maps it.
    #[serde(default)]
    pub mergeable: bool,
    /// Most bytes that `vm.resize` can add while the guest runs, by ACPI. Fewer can where addresses end before.
    #[serde(default)]
    pub hotplug_size: u64,
    /// The host keeps as much for it, or refuses the VM. Of memory that is shared it gives all of it at once.
    #[serde(default)]
    pub reserve: bool,
    /// The zones that it is made of, each with memory of its own kind.
    #[serde(default, deserialize_with = "object::list_or_null")]
    pub zones: Vec<MemoryZoneConfig>,
}

impl MemoryConfig {
    /// The option.
    pub const OPTION: Field = Field::new("--memory", "memory");
    keys! {
        SIZE = "size", SHARED = "shared", HUGEPAGE_SIZE = "hugepage_size", HOTPLUG_SIZE = "hotplug_size",
        MERGEABLE = "mergeable",
    }

    /// [`Self::zones`].
    pub const ZONES: Field = MemoryZoneConfig::OPTION;

    /// `size` bytes and nothing special.
    pub fn with_size(size: u64) -> Self {
        Self { size, ..Self::default() }
    }

    /// Bytes that the guest has.
    pub fn total(&self) -> u64 {
        self.zones.iter().fold(self.size, |sum, zone| sum.saturating_add(zone.size))
    }

    /// The same with as many bytes as the guest was booted with, to which others may have come. Zones keep their sizes.
    pub fn booted_with(&self, bytes: u64) -> Self {
        let size = if self.zones.is_empty() { bytes } else { self.size };
        Self { size, ..self.clone() }
    }

    /// The zones that it is made of: one where none are given.
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

    /// Bytes of a reserved huge page.
    fn huge_page(&self) -> u64 {
        self.hugepage_size.unwrap_or(2 * MIB)
    }

    /// Whether another process can be given all of it.
    pub fn can_be_shared(&self) -> bool {
        if self.zones.is_empty() {
            return self.shared || self.hugepages;
        }
        self.zones.iter().all(MemoryZoneConfig::can_be_shared)
    }

    /// Checks the size and what kind of memory it is.
    ///
    /// # Errors
    /// It is too little, too much, or no multiple of a huge page; or it cannot be of this kind.
    pub fn check(&self) -> Result<(), ConfigError> {
        if !self.zones.is_empty() {
            self.check_beside_zones()?;
            MemoryZoneConfig::check_all(&self.zones)?;
        }
        let (size, page) = (self.total(), self.huge_page());
        ensure(size >= MIN_MEMORY, Self::SIZE, || {
            format!("{size} bytes are too little, the least is {}M", MIN_MEMORY / MIB)
        })?;
        ensure(size <= MAX_MEMORY, Self::SIZE, || {
            format!("{size} bytes are too much, the most is {}G", MAX_MEMORY >> 30)
        })?;
        let is_whole = size.is_multiple_of(MEMORY_GRANULE);
        ensure(is_whole, Self::SIZE, || format!("{size} bytes are no multiple of {}M", MEMORY_GRANULE / MIB))?;
        let is_huge = !self.hugepages || size.is_multiple_of(page);
        ensure(is_huge, Self::SIZE, || format!("{size} bytes are no multiple of a huge page's {page}"))?;
        let is_used = self.hugepages || self.hugepage_size.is_none();
        ensure(is_used, Self::HUGEPAGE_SIZE, || "needs hugepages, which are off")?;
        ensure([2 * MIB, GIB].contains(&page), Self::HUGEPAGE_SIZE, || format!("{page} is neither 2M nor 1G"))?;
        ensure(
            !self.mergeable || !self.can_be_shared(),
            Self::MERGEABLE,
            || "must be off with shared or hugepages: the host merges private pages only",
        )
    }

    /// Checks that all is said of zones where there are any.
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
                format!("{off} with {}: each zone has its own", Self::ZONES.name(terms))
            })?;
        }
        ensure_in_terms(self.hotplug_size == 0, Self::HOTPLUG_SIZE, |terms| {
            format!("does not go with {}, which keep their sizes", Self::ZONES.name(terms))
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
    fn senseless_sizes_are_refused() {
        for size in [0, MIB, 31 * MIB, 33 * MIB, 512 * MIB + 1, !(2 * MIB - 1)] {
            assert_eq!(MemoryConfig::with_size(size).check().unwrap_err().field, MemoryConfig::SIZE, "{size}");
        }
        let plain = MemoryConfig::with_size(MAX_MEMORY);
        assert_eq!((plain.check(), plain.can_be_shared()), (Ok(()), false));
    }

    #[test]
    fn pages_that_the_memory_cannot_have_are_refused() {
        let refused = |text: &str| text.parse::<MemoryConfig>().unwrap().check().unwrap_err().to_string();
        assert_eq!(refused("size=64M,hugepage_size=2M"), "--memory hugepage_size: needs hugepages, which are off");
        let odd = refused("size=64M,hugepages=on,hugepage_size=4M");
        assert_eq!(odd, "--memory hugepage_size: 4194304 is neither 2M nor 1G");
        let cut = refused("size=64M,hugepages=on,hugepage_size=1G");
        assert_eq!(cut, "--memory size: 67108864 bytes are no multiple of a huge page's 1073741824");
        assert!(refused("size=64M,shared=on,mergeable=on").starts_with("--memory mergeable: must be off with shared"));
    }

    #[test]
    fn zones_say_all_and_memory_nothing_beside_them() {
        let zones: Vec<MemoryZoneConfig> =
            ["id=a,size=64M,shared=on", "id=b,size=32M"].map(|zone| zone.parse().unwrap()).into();
        let of = |text: &str| MemoryConfig { zones: zones.clone(), ..text.parse().unwrap() };
        let memory = of("size=0");
        assert_eq!((memory.check(), memory.total(), memory.can_be_shared()), (Ok(()), 96 * MIB, false));
        assert_eq!(memory.all_zones(), zones);
        for key in ["shared=on", "hugepages=on", "prefault=on", "mergeable=on", "reserve=on"] {
            let refused = of(&format!("size=0,{key}")).check().unwrap_err().to_string();
            let name = key.trim_end_matches("=on");
            assert_eq!(refused, format!("--memory {name}: must be left out with --memory-zone: each zone has its own"));
        }
        assert!(of("size=64M").check().unwrap_err().to_string().starts_with("--memory size: must be 0 with"));
        let grows = of("size=0,hotplug_size=1G").check().unwrap_err().explain(Terms::Json);
        assert_eq!(grows, "memory.hotplug_size: does not go with memory.zones, which keep their sizes");
        let little = MemoryConfig { zones: zones[1..].to_vec(), ..of("size=0") };
        assert_eq!(little.check(), Ok(()));
        assert_eq!(MemoryConfig { zones: vec![], ..of("size=0") }.check().unwrap_err().field, MemoryConfig::SIZE);
    }
}

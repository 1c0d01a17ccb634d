// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The guest's RAM.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::MemoryZoneConfig;
use crate::error::ConfigError;
use crate::field::{Field, keys};
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
    #[serde(default = "default_thp")]
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
    #[schema(value_type = Option<Vec<MemoryZoneConfig>>)]
    pub zones: Vec<MemoryZoneConfig>,
}

fn default_thp() -> bool {
    true
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
        let size = self.total();
        let rule = if size < MIN_MEMORY {
            format!("{size} bytes are too little, the least is {}M", MIN_MEMORY / MIB)
        } else if size > MAX_MEMORY {
            format!("{size} bytes are too much, the most is {}G", MAX_MEMORY >> 30)
        } else if !size.is_multiple_of(MEMORY_GRANULE) {
            format!("{size} bytes are no multiple of {}M", MEMORY_GRANULE / MIB)
        } else if self.hugepages && !size.is_multiple_of(self.huge_page()) {
            format!("{size} bytes are no multiple of a huge page's {}", self.huge_page())
        } else {
            return self.check_pages();
        };
        Err(ConfigError::new(Self::SIZE, rule))
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
        if let Some((key, _)) = said.into_iter().find(|(_, said)| *said) {
            return Err(ConfigError::in_terms(Self::OPTION.key(key), |terms| {
                let off = if key == "size" { "must be 0" } else { "must be left out" };
                format!("{off} with {}: each zone has its own", Self::ZONES.name(terms))
            }));
        }
        if self.hotplug_size != 0 {
            return Err(ConfigError::in_terms(Self::HOTPLUG_SIZE, |terms| {
                format!("does not go with {}, which keep their sizes", Self::ZONES.name(terms))
            }));
        }
        Ok(())
    }

    fn check_pages(&self) -> Result<(), ConfigError> {
        if let Some(bytes) = self.hugepage_size {
            let rule = match bytes {
                _ if !self.hugepages => "needs hugepages, which are off".to_string(),
                bytes if bytes != 2 * MIB && bytes != GIB => format!("{bytes} is neither 2M nor 1G"),
                _ => String::new(),
            };
            if !rule.is_empty() {
                return Err(ConfigError::new(Self::HUGEPAGE_SIZE, rule));
            }
        }
        if self.mergeable && self.can_be_shared() {
            let rule = "must be off with shared or hugepages: the host merges private pages only";
            return Err(ConfigError::new(Self::MERGEABLE, rule));
        }
        Ok(())
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
    fn memory_defaults_to_private_with_transparent_huge_pages() {
        let plain: MemoryConfig = "size=64M".parse().unwrap();
        assert_eq!(plain, MemoryConfig::with_size(64 * MIB));
        assert_eq!(plain, serde_json::from_str(r#"{"size":67108864}"#).unwrap());
        assert!(!plain.can_be_shared());
        let all = "size=1G,shared=on,hugepages=on,hugepage_size=1G,thp=off,prefault=on,reserve=on,hotplug_size=2G,hotplug_method=acpi";
        let wanted = MemoryConfig {
            size: GIB,
            shared: true,
            hugepages: true,
            hugepage_size: Some(GIB),
            thp: false,
            prefault: true,
            mergeable: false,
            hotplug_size: 2 * GIB,
            reserve: true,
            zones: Vec::new(),
        };
        assert_eq!(all.parse(), Ok(wanted));
    }

    #[test]
    fn senseless_sizes_are_refused() {
        for size in [0, MIB, 31 * MIB, 33 * MIB, 512 * MIB + 1, !(2 * MIB - 1)] {
            assert_eq!(MemoryConfig::with_size(size).check().unwrap_err().field, MemoryConfig::SIZE, "{size}");
        }
        assert_eq!(MemoryConfig::with_size(MAX_MEMORY).check(), Ok(()));
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
        let method = "size=64M,hotplug_method=virtio-mem".parse::<MemoryConfig>().unwrap_err().to_string();
        assert!(method.starts_with("--memory hotplug_method: 'virtio-mem' is not supported: leave it out; RAM comes"));
        assert!("size=64M,hotplug_method=acpi,hotplugged_size=0".parse::<MemoryConfig>().is_ok());
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

    #[test]
    fn malformed_sizes_name_option_and_rule() {
        let refused = |text: &str| text.parse::<MemoryConfig>().unwrap_err().to_string();
        assert!(refused("size=12Q").starts_with("--memory size: '12Q' is no size"));
        assert_eq!("size=".parse(), Ok(MemoryConfig::default()));
        assert_eq!("".parse(), Ok(MemoryConfig::default()));
    }
}

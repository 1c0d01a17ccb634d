// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The guest's RAM.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ConfigError;
use crate::field::Field;
use crate::limits::{MAX_MEMORY, MEMORY_GRANULE, MIB, MIN_MEMORY};
use crate::option_list::OptionList;

/// The guest's RAM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MemoryConfig {
    /// Bytes, a multiple of 2 MiB.
    #[schema(minimum = 33_554_432, maximum = 549_755_813_888_u64, multiple_of = 2_097_152)]
    pub size: u64,
    /// Other processes can map it (a memfd), as opposed to memory of this process alone.
    #[serde(default)]
    pub shared: bool,
    /// It is made of the host's reserved huge pages of 2 MiB (always as a memfd).
    #[serde(default)]
    pub hugepages: bool,
    /// The host is asked for transparent huge pages. Of no meaning with `hugepages`.
    #[serde(default = "default_thp")]
    pub thp: bool,
}

fn default_thp() -> bool {
    true
}

impl MemoryConfig {
    /// The option.
    pub const OPTION: Field = Field::new("--memory", "memory");
    /// [`Self::size`].
    pub const SIZE: Field = Self::OPTION.key("size");
    /// [`Self::shared`].
    pub const SHARED: Field = Self::OPTION.key("shared");

    /// `size` bytes and nothing special.
    pub fn with_size(size: u64) -> Self {
        Self { size, shared: false, hugepages: false, thp: true }
    }

    /// Whether another process can be given it.
    pub fn can_be_shared(&self) -> bool {
        self.shared || self.hugepages
    }

    /// Checks the size.
    ///
    /// # Errors
    /// It is too little, too much, or no multiple of a huge page.
    pub fn check(&self) -> Result<(), ConfigError> {
        let size = self.size;
        let rule = if size < MIN_MEMORY {
            format!("{size} bytes are too little, the least is {}M", MIN_MEMORY / MIB)
        } else if size > MAX_MEMORY {
            format!("{size} bytes are too much, the most is {}G", MAX_MEMORY >> 30)
        } else if !size.is_multiple_of(MEMORY_GRANULE) {
            format!("{size} bytes are no multiple of {}M", MEMORY_GRANULE / MIB)
        } else {
            return Ok(());
        };
        Err(ConfigError::new(Self::SIZE, rule))
    }
}

impl Default for MemoryConfig {
    fn default() -> Self {
        Self::with_size(512 * MIB)
    }
}

impl FromStr for MemoryConfig {
    type Err = ConfigError;

    /// Parses `size=SIZE[,shared=on|off][,hugepages=on|off][,thp=on|off]`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let list = OptionList::parse(Self::OPTION, text, &["size", "shared", "hugepages", "thp"])?;
        list.required("size")?;
        Ok(Self {
            size: list.size("size")?.unwrap_or_default(),
            shared: list.toggle("shared", false)?,
            hugepages: list.toggle("hugepages", false)?,
            thp: list.toggle("thp", true)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_private_with_transparent_huge_pages_unless_said_otherwise() {
        let plain: MemoryConfig = "size=64M".parse().unwrap();
        assert_eq!(plain, MemoryConfig::with_size(64 * MIB));
        assert_eq!(plain, serde_json::from_str(r#"{"size":67108864}"#).unwrap());
        assert!(!plain.can_be_shared());
        let all: MemoryConfig = "size=64M,shared=on,hugepages=on,thp=off".parse().unwrap();
        assert_eq!(all, MemoryConfig { size: 64 * MIB, shared: true, hugepages: true, thp: false });
    }

    #[test]
    fn senseless_sizes_are_refused() {
        for size in [0, MIB, 31 * MIB, 33 * MIB, 512 * MIB + 1, !(2 * MIB - 1)] {
            assert_eq!(MemoryConfig::with_size(size).check().unwrap_err().field, MemoryConfig::SIZE, "{size}");
        }
        assert_eq!(MemoryConfig::with_size(MAX_MEMORY).check(), Ok(()));
    }

    #[test]
    fn malformed_sizes_name_option_and_rule() {
        let refused = |text: &str| text.parse::<MemoryConfig>().unwrap_err().to_string();
        assert!(refused("size=12Q").starts_with("--memory size: '12Q' is no size"));
        assert_eq!(refused("size="), "--memory: 'size=' is needed");
    }
}

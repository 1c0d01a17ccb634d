// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio-iommu with its bounce windows. A VM has one where a device is behind it, or is to come there: only the windows
//! are configured.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Kind, KindConfig, Number, PartConfig};
use crate::body;
use crate::config::MemoryConfig;
use crate::error::ConfigError;
use crate::field::Field;
use crate::limits::{CHUNK_SIZE, DEFAULT_BOUNCE_SIZE, MAX_BOUNCE_SIZE, MIB};
use crate::option_list::OptionList;

/// Bounce windows of the virtio-iommu.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IommuBounceConfig {
    /// Budget of all windows in bytes, a multiple of the chunk size.
    #[serde(default = "default_size")]
    #[schema(minimum = 2_097_152, multiple_of = 2_097_152)]
    pub size: u64,
    /// How far the budget can be raised while the VM runs, in bytes: the size of the shared region. 0 stands for `size`.
    #[serde(default)]
    #[schema(multiple_of = 2_097_152)]
    pub max: u64,
    /// Size in bytes at or below which a DMA is bounced; `None` lets the guest's driver decide.
    #[serde(default)]
    #[schema(value_type = Option<u64>, maximum = 4_294_967_295_u64)]
    pub threshold: Option<u32>,
    /// Whether windows are backed by huge pages of the host.
    #[serde(default)]
    pub hugepages: bool,
}

fn default_size() -> u64 {
    DEFAULT_BOUNCE_SIZE
}

impl IommuBounceConfig {
    /// The option.
    pub const OPTION: Field = Field::new("--iommu-bounce", "iommu_bounce");
    /// [`Self::size`].
    pub const SIZE: Field = Self::OPTION.key("size");
    /// [`Self::max`].
    pub const MAX: Field = Self::OPTION.key("max");
    /// ID of the virtio-iommu.
    pub const ID: &'static str = "_iommu";

    /// The kind.
    pub const KIND: Kind = Kind {
        name: "iommu",
        field: Self::OPTION,
        number: Number::One,
        value: "size=SIZE,…",
        help: "Bounce windows: [size=64M][,max=SIZE][,threshold=auto|SIZE][,hugepages=on|off]",
        bare: Some(""),
        id: Self::ID,
        takes_slot: false,
        passed_through: false,
        iommu: None,
        default_for_clients: true,
        add: None,
        parse: |text| text.parse().map(PartConfig::Iommu),
        read: |bytes| body::parse_device(bytes, Self::OPTION).map(PartConfig::Iommu),
    };
}

impl KindConfig for IommuBounceConfig {
    fn kind(&self) -> &'static Kind {
        &Self::KIND
    }

    fn id(&self) -> Option<&str> {
        None
    }

    fn set_id(&mut self, _: String) {}

    fn complete(&mut self) {
        if self.max == 0 {
            self.max = self.size;
        }
    }

    fn check(&self, _: &MemoryConfig) -> Result<(), ConfigError> {
        let Self { size, max, .. } = *self;
        let (field, rule) = if size == 0 || !size.is_multiple_of(CHUNK_SIZE) {
            (Self::SIZE, format!("{size} bytes are no positive multiple of {}M", CHUNK_SIZE / MIB))
        } else if !max.is_multiple_of(CHUNK_SIZE) {
            (Self::MAX, format!("{max} bytes are no multiple of {}M", CHUNK_SIZE / MIB))
        } else if max < size {
            (Self::MAX, format!("{max} bytes are less than size ({size} bytes)"))
        } else if max > MAX_BOUNCE_SIZE {
            (Self::MAX, format!("{max} bytes are too much, the most is {}G", MAX_BOUNCE_SIZE >> 30))
        } else {
            return Ok(());
        };
        Err(ConfigError::new(field, rule))
    }

    fn to_part(&self) -> PartConfig {
        PartConfig::Iommu(self.clone())
    }
}

impl FromStr for IommuBounceConfig {
    type Err = ConfigError;

    /// Parses `[size=SIZE][,max=SIZE][,threshold=auto|SIZE][,hugepages=on|off]`; the text may be empty.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        if text.is_empty() {
            let size = DEFAULT_BOUNCE_SIZE;
            return Ok(Self { size, max: size, threshold: None, hugepages: false });
        }
        let list = OptionList::parse(Self::OPTION, text, &["size", "max", "threshold", "hugepages"])?;
        let size = list.size("size")?.unwrap_or(DEFAULT_BOUNCE_SIZE);
        let threshold = match list.get("threshold") {
            None | Some("auto") => None,
            Some(value) => match list.size("threshold")?.and_then(|bytes| u32::try_from(bytes).ok()) {
                Some(bytes) if bytes > 0 => Some(bytes),
                _ => {
                    let rule = format!("'{value}' is neither 'auto' nor 1 to 4294967295");
                    return Err(ConfigError::new(Self::OPTION.key("threshold"), rule));
                }
            },
        };
        let max = list.size("max")?.unwrap_or(size);
        Ok(Self { size, max, threshold, hugepages: list.toggle("hugepages", false)? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounce_defaults_to_64_mib_and_a_region_as_large() {
        let bounce: IommuBounceConfig = "".parse().unwrap();
        assert_eq!((bounce.size, bounce.max, bounce.threshold, bounce.hugepages), (64 * MIB, 64 * MIB, None, false));
        let bounce: IommuBounceConfig = "size=32M,max=1G,threshold=64K,hugepages=on".parse().unwrap();
        assert_eq!((bounce.size, bounce.max, bounce.threshold), (32 * MIB, 1 << 30, Some(65536)));
        assert!(bounce.hugepages);
        let refused = "threshold=0".parse::<IommuBounceConfig>().unwrap_err().to_string();
        assert!(refused.starts_with("--iommu-bounce threshold: '0'"), "{refused}");
    }

    #[test]
    fn sizes_must_be_whole_chunks_and_max_no_less_than_size() {
        let memory = MemoryConfig::default();
        for (text, field) in [
            ("size=3M", IommuBounceConfig::SIZE),
            ("size=0", IommuBounceConfig::SIZE),
            ("size=64M,max=32M", IommuBounceConfig::MAX),
            ("size=64M,max=65M", IommuBounceConfig::MAX),
            ("size=64M,max=64G", IommuBounceConfig::MAX),
        ] {
            let bounce: IommuBounceConfig = text.parse().unwrap();
            assert_eq!(bounce.check(&memory).unwrap_err().field, field, "{text}");
        }
    }
}

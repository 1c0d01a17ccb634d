// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio-iommu with its bounce windows. A VM has one where a device is behind it, or is to come there: only the windows
//! are configured.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Kind, KindConfig, Number, PartConfig};
use crate::config::MemoryConfig;
use crate::error::ConfigError;
use crate::field::{Field, keys};
use crate::limits::{CHUNK_SIZE, DEFAULT_BOUNCE_SIZE, MAX_BOUNCE_SIZE, MIB};
use crate::option_list::{FromOption, OptionList, Special, from_str};

/// The least that the guest can map.
const PAGE_SIZE: u64 = 4096;

/// Bounce windows of the virtio-iommu, and how much the guest may have mapped beside them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IommuBounceConfig {
    /// Budget of all windows in bytes, a multiple of the chunk size. 0, which `max` has to be too: there are no windows.
    #[serde(default = "default_size")]
    #[schema(multiple_of = 2_097_152)]
    pub size: u64,
    /// How far the budget can be raised while the VM runs, in bytes: the size of the shared region. 0 stands for `size`.
    #[serde(default)]
    #[schema(multiple_of = 2_097_152)]
    pub max: u64,
    /// Size in bytes at or below which a DMA is bounced; `None` lets the guest's driver decide.
    #[schema(value_type = Option<u64>, maximum = 4_294_967_295_u64)]
    pub threshold: Option<u32>,
    /// The most bytes of RAM that the guest may have mapped for devices, beside the windows: a positive multiple of 4096. A request beyond
    /// it gets NOMEM. `None`: no limit but the host's.
    #[schema(minimum = 4096, multiple_of = 4096)]
    pub max_mapped: Option<u64>,
    /// Whether windows are backed by huge pages of the host.
    #[serde(default)]
    pub hugepages: bool,
    /// On which side of 4 GiB the IOVAs of windows are.
    #[serde(default)]
    pub aperture: Aperture,
}

/// On which side of 4 GiB the IOVAs of bounce windows are. Those above are not among the addresses at which hosts have BARs of 32 bits, but
/// not every driver of guests knows such windows, nor does every device reach them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Aperture {
    /// Below, if the host leaves room there, or else above.
    #[default]
    Auto,
    /// Below.
    Low,
    /// Above.
    High,
}

fn default_size() -> u64 {
    DEFAULT_BOUNCE_SIZE
}

impl IommuBounceConfig {
    /// The option.
    pub const OPTION: Field = Field::new("--iommu-bounce", "iommu_bounce");
    keys! { SIZE = "size", MAX = "max", MAX_MAPPED = "max_mapped" }

    /// ID of the virtio-iommu.
    pub const ID: &'static str = "_iommu";

    /// The kind.
    pub const KIND: Kind = Kind {
        value: "size=SIZE,…",
        help: "Bounce windows",
        keys: "[size=64M][,max=SIZE][,threshold=auto|SIZE][,max_mapped=SIZE][,hugepages=on|off][,aperture=auto|low|high]",
        bare: Some(""),
        takes_slot: false,
        iommu: None,
        default_for_clients: true,
        ..Kind::of::<Self>("iommu", Self::ID, Number::One)
    };
}

impl IommuBounceConfig {
    /// Whether there are windows, or none and only a virtio-iommu with its limit.
    pub fn has_windows(&self) -> bool {
        self.size != 0 || self.max != 0
    }

    /// What is wrong with so many bytes as [`max_mapped`](Self::max_mapped).
    pub(crate) fn mapped_rule(bytes: u64) -> Option<String> {
        let most = i64::MAX.cast_unsigned();
        let fits = bytes != 0 && bytes.is_multiple_of(PAGE_SIZE) && bytes <= most;
        (!fits).then(|| format!("{bytes} bytes are no positive multiple of {PAGE_SIZE} up to {most}"))
    }
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
        let Self { size, max, max_mapped, .. } = *self;
        if let Some(rule) = max_mapped.and_then(Self::mapped_rule) {
            return Err(ConfigError::new(Self::MAX_MAPPED, rule));
        }
        if !self.has_windows() {
            return Ok(());
        }
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
        self.clone().into()
    }
}

impl FromOption for IommuBounceConfig {
    const OPTION: Field = Self::OPTION;
    const SPECIAL: &'static [Special] = &[Special::By("threshold", &["threshold"])];

    fn finish(&mut self, list: &OptionList) -> Result<(), ConfigError> {
        if let Some(value) = list.get("threshold").filter(|value| *value != "auto") {
            let bytes = list.read("threshold")?.and_then(|bytes: u64| u32::try_from(bytes).ok());
            self.threshold = bytes.filter(|bytes| *bytes > 0);
            if self.threshold.is_none() {
                let rule = format!("'{value}' is neither 'auto' nor 1 to 4294967295");
                return Err(ConfigError::new(Self::OPTION.key("threshold"), rule));
            }
        }
        self.complete();
        Ok(())
    }
}
from_str!(IommuBounceConfig);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounce_defaults_to_64_mib_and_a_region_as_large() {
        let bounce: IommuBounceConfig = "".parse().unwrap();
        assert_eq!((bounce.size, bounce.max, bounce.threshold, bounce.hugepages), (64 * MIB, 64 * MIB, None, false));
        assert_eq!(bounce.max_mapped, None);
        let bounce: IommuBounceConfig = "size=32M,max=1G,threshold=64K,max_mapped=96M,hugepages=on".parse().unwrap();
        assert_eq!(bounce.max_mapped, Some(96 * MIB));
        assert_eq!((bounce.size, bounce.max, bounce.threshold), (32 * MIB, 1 << 30, Some(65536)));
        assert!(bounce.hugepages);
    }

    #[test]
    fn aperture_is_on_the_side_that_is_asked_for() {
        for (text, side) in [("", Aperture::Auto), ("aperture=low", Aperture::Low), ("aperture=high", Aperture::High)] {
            let bounce: IommuBounceConfig = text.parse().unwrap();
            assert_eq!(bounce.aperture, side, "{text}");
        }
    }

    #[test]
    fn sizes_must_be_whole_chunks_and_max_no_less_than_size() {
        let memory = MemoryConfig::default();
        for (text, field) in [
            ("size=3M", IommuBounceConfig::SIZE),
            ("size=0,max=64M", IommuBounceConfig::SIZE),
            ("max_mapped=0", IommuBounceConfig::MAX_MAPPED),
            ("size=0,max_mapped=4097", IommuBounceConfig::MAX_MAPPED),
            ("size=64M,max=32M", IommuBounceConfig::MAX),
            ("size=64M,max=65M", IommuBounceConfig::MAX),
            ("size=64M,max=64G", IommuBounceConfig::MAX),
        ] {
            let bounce: IommuBounceConfig = text.parse().unwrap();
            assert_eq!(bounce.check(&memory).unwrap_err().field, field, "{text}");
        }
    }

    #[test]
    fn no_windows_leave_the_limit_on_what_is_mapped() {
        let mut bounce: IommuBounceConfig = "size=0,max_mapped=96M".parse().unwrap();
        bounce.complete();
        bounce.check(&MemoryConfig::default()).unwrap();
        assert_eq!((bounce.has_windows(), bounce.max_mapped), (false, Some(96 * MIB)));
        assert!("".parse::<IommuBounceConfig>().unwrap().has_windows());
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Bounce windows and the mapping limit of the virtio-iommu. The virtio-iommu itself has no configuration. A VM has a virtio-iommu if a
//! device is behind it now, or may be added behind it later.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Kind, KindConfig, Number, PartConfig};
use crate::config::MemoryConfig;
use crate::error::{ConfigError, ensure};
use crate::field::{Field, keys};
use crate::limits::{CHUNK_SIZE, DEFAULT_BOUNCE_SIZE, MAX_BOUNCE_SIZE, MIB};
use crate::option_list::{FromOption, OptionList, Special, from_str};

/// Smallest mapping of the guest in bytes.
const PAGE_SIZE: u64 = 4096;

/// Bounce windows of the virtio-iommu, and the limit on other mappings of the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IommuBounceConfig {
    /// Budget of all windows in bytes, a multiple of 2 MiB (the chunk size). If the budget is 0, the VM has no windows, and `max` must be 0
    /// too.
    #[serde(default = "default_size")]
    #[schema(multiple_of = 2_097_152)]
    pub size: u64,
    /// Maximum budget in bytes that can be set while the VM runs, a multiple of 2 MiB. The shared memory region of the windows has
    /// this size. 0 stands for `size`.
    #[serde(default)]
    #[schema(multiple_of = 2_097_152)]
    pub max: u64,
    /// Maximum size in bytes of a DMA that the guest is advised to bounce. By default, the guest's driver decides.
    #[schema(value_type = Option<u64>, maximum = 4_294_967_295_u64)]
    pub threshold: Option<u32>,
    /// Maximum size in bytes of a DMA that the guest is advised to bounce if the device writes the memory. By default, `threshold` also
    /// applies to this DMA.
    #[schema(value_type = Option<u64>, maximum = 4_294_967_295_u64)]
    pub threshold_write: Option<u32>,
    /// Maximum bytes of guest RAM that can be mapped for devices, not counting the windows: a positive multiple of 4096. A MAP
    /// request beyond the limit fails with NOMEM. By default, only the host limits the mappings.
    #[schema(minimum = 4096, multiple_of = 4096)]
    pub max_mapped: Option<u64>,
    /// True if the windows consist of the host's reserved huge pages (hugetlb).
    #[serde(default)]
    pub hugepages: bool,
    /// Placement of the windows' IOVAs: below 4 GiB (`low`) or above 4 GiB (`high`). With `auto`, the windows are below 4 GiB if the host
    /// has enough free IOVAs there.
    #[serde(default)]
    pub aperture: Aperture,
}

/// Placement of the bounce windows' IOVAs. Above 4 GiB, windows cannot collide with 32-bit BARs of the host. But not every guest
/// driver supports windows above 4 GiB, and not every device can address them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Aperture {
    /// Below 4 GiB if the host has enough free IOVAs there, otherwise above.
    #[default]
    Auto,
    /// Below 4 GiB.
    Low,
    /// Above 4 GiB.
    High,
}

fn default_size() -> u64 {
    DEFAULT_BOUNCE_SIZE
}

impl IommuBounceConfig {
    /// Option and JSON field of this configuration.
    pub const OPTION: Field = Field::new("--iommu-bounce", "iommu_bounce");
    keys! { SIZE = "size", MAX = "max", MAX_MAPPED = "max_mapped" }

    /// ID of the virtio-iommu.
    pub const ID: &'static str = "_iommu";

    /// Registry entry of this kind of device.
    pub const KIND: Kind = Kind {
        value: "size=SIZE,…",
        help: "Bounce windows of the virtio-iommu",
        keys: "[size=64M][,max=SIZE][,threshold=auto|SIZE][,threshold_write=auto|SIZE][,max_mapped=SIZE][,hugepages=on|off][,aperture=auto|low|high]",
        bare: Some(""),
        takes_slot: false,
        iommu: None,
        default_for_clients: true,
        ..Kind::of::<Self>("iommu", Self::ID, Number::One)
    };
}

impl IommuBounceConfig {
    /// True if the VM has bounce windows. Otherwise the VM has only a virtio-iommu with its mapping limit.
    pub fn has_windows(&self) -> bool {
        self.size != 0 || self.max != 0
    }

    /// Returns the text of an error if `bytes` is not a valid [`max_mapped`](Self::max_mapped).
    pub(crate) fn mapped_rule(bytes: u64) -> Option<String> {
        let most = i64::MAX.cast_unsigned();
        let fits = bytes != 0 && bytes.is_multiple_of(PAGE_SIZE) && bytes <= most;
        (!fits).then(|| format!("is {bytes} bytes, but must be a multiple of {PAGE_SIZE} from {PAGE_SIZE} to {most}"))
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
        let (is_whole, chunk) = (|bytes: u64| bytes.is_multiple_of(CHUNK_SIZE), CHUNK_SIZE / MIB);
        ensure(size != 0 && is_whole(size), Self::SIZE, || {
            format!("is {size} bytes, but must be a multiple of {chunk}M and at least {chunk}M")
        })?;
        ensure(is_whole(max), Self::MAX, || format!("{max} bytes are not a multiple of {chunk}M"))?;
        ensure(max >= size, Self::MAX, || format!("{max} bytes are less than size ({size} bytes)"))?;
        let most = MAX_BOUNCE_SIZE;
        ensure(max <= most, Self::MAX, || format!("{max} bytes are too many: the maximum is {}G", most >> 30))
    }

    fn to_part(&self) -> PartConfig {
        self.clone().into()
    }
}

/// Returns the size in bytes of a part `key`. `None` if the part is missing or `auto`.
fn threshold(list: &OptionList, key: &'static str) -> Result<Option<u32>, ConfigError> {
    let Some(value) = list.get(key).filter(|value| *value != "auto") else { return Ok(None) };
    let bytes = list.read(key)?.and_then(|bytes: u64| u32::try_from(bytes).ok()).filter(|bytes| *bytes > 0);
    ensure(bytes.is_some(), IommuBounceConfig::OPTION.key(key), || {
        format!("'{value}' is neither 'auto' nor a size of 1 to 4294967295 bytes")
    })?;
    Ok(bytes)
}

impl FromOption for IommuBounceConfig {
    const OPTION: Field = Self::OPTION;
    const SPECIAL: &'static [Special] =
        &[Special::By("threshold", &["threshold"]), Special::By("threshold_write", &["threshold_write"])];

    fn finish(&mut self, list: &OptionList) -> Result<(), ConfigError> {
        self.threshold = threshold(list, "threshold")?;
        self.threshold_write = threshold(list, "threshold_write")?;
        if list.get("max").is_none() {
            self.max = self.size;
        }
        Ok(())
    }
}
from_str!(IommuBounceConfig);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapping_limit_works_without_windows() {
        let mut bounce: IommuBounceConfig = "size=0,max_mapped=96M".parse().unwrap();
        bounce.complete();
        bounce.check(&MemoryConfig::default()).unwrap();
        assert_eq!((bounce.has_windows(), bounce.max_mapped), (false, Some(96 * MIB)));
        assert!("".parse::<IommuBounceConfig>().unwrap().has_windows());
    }
}

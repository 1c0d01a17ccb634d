// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio-iommu with its bounce windows. A VM has one where a device is behind it, or is to come there: only the windows
//! are configured.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Kind, KindConfig, Number, PartConfig};
use crate::config::MemoryConfig;
use crate::error::{ConfigError, ensure};
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
        let (is_whole, chunk) = (|bytes: u64| bytes.is_multiple_of(CHUNK_SIZE), CHUNK_SIZE / MIB);
        ensure(size != 0 && is_whole(size), Self::SIZE, || {
            format!("{size} bytes are no positive multiple of {chunk}M")
        })?;
        ensure(is_whole(max), Self::MAX, || format!("{max} bytes are no multiple of {chunk}M"))?;
        ensure(max >= size, Self::MAX, || format!("{max} bytes are less than size ({size} bytes)"))?;
        let most = MAX_BOUNCE_SIZE;
        ensure(max <= most, Self::MAX, || format!("{max} bytes are too much, the most is {}G", most >> 30))
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
            ensure(self.threshold.is_some(), Self::OPTION.key("threshold"), || {
                format!("'{value}' is neither 'auto' nor 1 to 4294967295")
            })?;
        }
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
    fn no_windows_leave_the_limit_on_what_is_mapped() {
        let mut bounce: IommuBounceConfig = "size=0,max_mapped=96M".parse().unwrap();
        bounce.complete();
        bounce.check(&MemoryConfig::default()).unwrap();
        assert_eq!((bounce.has_windows(), bounce.max_mapped), (false, Some(96 * MIB)));
        assert!("".parse::<IommuBounceConfig>().unwrap().has_windows());
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio-balloon device: RAM that the guest returns to the host while it runs.

use super::{Kind, KindConfig, Number, device_config, usual_methods};
use crate::config::MemoryConfig;
use crate::error::{ConfigError, ensure, ensure_in_terms};
use crate::field::{Field, keys};
use crate::option_list::from_option;

/// Page size of the balloon in bytes.
const PAGE: u64 = 4096;

device_config! {
    /// Balloon device: RAM that the guest returns to the host while it runs.
    pub struct BalloonConfig {
        /// Bytes that the guest returns, a multiple of 4096 and at most the size of its RAM.
        #[schema(multiple_of = 4096)]
        pub size: u64,
        /// True if a guest that runs out of memory may take memory back from the balloon.
        #[serde(default)]
        pub deflate_on_oom: bool,
        /// True if the guest also reports its free pages, which the host then reclaims.
        #[serde(default)]
        pub free_page_reporting: bool,
        /// Must be false: balloon drivers pass addresses that the virtio-iommu does not translate.
        #[serde(default)]
        pub iommu: bool,
    }
}

impl BalloonConfig {
    /// Option and JSON field of this configuration.
    pub const OPTION: Field = Field::new("--balloon", "balloon");
    keys! { SIZE = "size", IOMMU = "iommu" }

    /// Registry entry of this kind of device.
    pub const KIND: Kind = Kind {
        value: "size=SIZE,…",
        help: "Balloon, which lets the guest return RAM to the host",
        keys: "size=SIZE[,deflate_on_oom=on|off][,free_page_reporting=on|off]",
        iommu: None,
        ..Kind::of::<Self>("balloon", "_balloon", Number::One)
    };
}

impl KindConfig for BalloonConfig {
    // A balloon cannot be behind the virtio-iommu: `check` rejects `iommu`.
    usual_methods!();

    fn check(&self, memory: &MemoryConfig) -> Result<(), ConfigError> {
        ensure(!self.iommu, Self::IOMMU, || {
            "must be off, and the device must not be on a segment that iommu_segments lists: balloon drivers pass \
             untranslated addresses"
        })?;
        let size = self.size;
        ensure(size.is_multiple_of(PAGE), Self::SIZE, || format!("{size} bytes are not a multiple of {PAGE} bytes"))?;
        ensure_in_terms(size <= memory.total(), Self::SIZE, |terms| {
            format!(
                "{size} bytes are more than the guest's RAM of {} bytes ({})",
                memory.total(),
                MemoryConfig::SIZE.name(terms)
            )
        })
    }
}

from_option!(BalloonConfig);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::VmConfig;
    use crate::config::PayloadConfig;
    use crate::error::Explain;
    use crate::field::Terms;

    fn balloon(text: &str) -> BalloonConfig {
        text.parse().unwrap()
    }

    #[test]
    fn balloon_size_beyond_ram_or_not_whole_pages_is_refused() {
        let memory = MemoryConfig::with_size(64 << 20);
        let refused = |text| balloon(text).check(&memory).unwrap_err().explain(Terms::Json);
        assert_eq!(balloon("size=64M").check(&memory), Ok(()));
        assert_eq!(refused("size=4097"), "balloon.size: 4097 bytes are not a multiple of 4096 bytes");
        assert_eq!(
            refused("size=65M"),
            "balloon.size: 68157440 bytes are more than the guest's RAM of 67108864 bytes (memory.size)"
        );
    }

    #[test]
    fn balloon_behind_the_iommu_is_refused() {
        let refused = |config: VmConfig| {
            let error = config.check().unwrap_err().to_string();
            assert!(error.starts_with("--balloon iommu: must be off"), "{error}");
        };
        let with = |text| {
            let payload = PayloadConfig::of_kernel("/k");
            VmConfig { payload, balloon: Some(balloon(text)), ..VmConfig::default() }
        };
        refused(with("size=1M,iommu=on"));
        let mut config = with("size=1M,pci_segment=1");
        config.platform.num_pci_segments = 2;
        config.platform.iommu_segments = vec![1];
        refused(config);
    }
}

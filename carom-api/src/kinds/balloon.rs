// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio-balloon device: RAM that the guest gives back while it runs.

use super::{Kind, KindConfig, Number, device_config, usual_methods};
use crate::config::MemoryConfig;
use crate::error::{ConfigError, ensure, ensure_in_terms};
use crate::field::{Field, keys};
use crate::option_list::from_option;

/// Bytes of the pages that a balloon has.
const PAGE: u64 = 4096;

device_config! {
    /// RAM that the guest gives back while it runs.
    pub struct BalloonConfig {
        /// Bytes that the guest is to give back, a multiple of 4096 and no more than it has.
        #[schema(multiple_of = 4096)]
        pub size: u64,
        /// True if a guest that is out of memory may take some of them itself.
        #[serde(default)]
        pub deflate_on_oom: bool,
        /// True if the guest also gives free pages back.
        #[serde(default)]
        pub free_page_reporting: bool,
        /// Must be false: drivers give a balloon addresses that are not translated.
        #[serde(default)]
        pub iommu: bool,
    }
}

impl BalloonConfig {
    /// The option.
    pub const OPTION: Field = Field::new("--balloon", "balloon");
    keys! { SIZE = "size", IOMMU = "iommu" }

    /// The kind.
    pub const KIND: Kind = Kind {
        value: "size=SIZE,…",
        help: "RAM that the guest gives back",
        keys: "size=SIZE[,deflate_on_oom=on|off][,free_page_reporting=on|off]",
        iommu: None,
        ..Kind::of::<Self>("balloon", "_balloon", Number::One)
    };
}

impl KindConfig for BalloonConfig {
    // It cannot be behind the virtio-iommu, which its check says.
    usual_methods!();

    fn check(&self, memory: &MemoryConfig) -> Result<(), ConfigError> {
        ensure(!self.iommu, Self::IOMMU, || {
            "must be off, and the device on no segment of the virtio-iommu: drivers give a balloon addresses that are not \
             translated"
        })?;
        let size = self.size;
        ensure(size.is_multiple_of(PAGE), Self::SIZE, || format!("{size} bytes are no multiple of {PAGE}"))?;
        ensure_in_terms(size <= memory.total(), Self::SIZE, |terms| {
            format!("{size} bytes are more than the guest has ({})", MemoryConfig::SIZE.name(terms))
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
    fn balloon_has_whole_pages_of_what_the_guest_has() {
        let memory = MemoryConfig::with_size(64 << 20);
        let refused = |text| balloon(text).check(&memory).unwrap_err().explain(Terms::Json);
        assert_eq!(balloon("size=64M").check(&memory), Ok(()));
        assert_eq!(refused("size=4097"), "balloon.size: 4097 bytes are no multiple of 4096");
        assert_eq!(refused("size=65M"), "balloon.size: 68157440 bytes are more than the guest has (memory.size)");
    }

    #[test]
    fn balloon_is_not_behind_the_iommu_however_it_is_put_there() {
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

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio-balloon device: RAM that the guest gives back while it runs.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Kind, KindConfig, Number, PartConfig, usual_methods};
use crate::body;
use crate::config::MemoryConfig;
use crate::error::ConfigError;
use crate::field::{Field, Terms};
use crate::option_list::OptionList;

/// Bytes of the pages that a balloon has.
const PAGE: u64 = 4096;

/// RAM that the guest gives back while it runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BalloonConfig {
    /// Bytes that the guest is to give back, a multiple of 4096 and no more than it has.
    #[schema(multiple_of = 4096)]
    pub size: u64,
    /// Whether a guest that is out of memory may take some of them itself.
    #[serde(default)]
    pub deflate_on_oom: bool,
    /// Whether the guest gives pages back that are free, beside those.
    #[serde(default)]
    pub free_page_reporting: bool,
    /// Must be false: drivers give a balloon addresses that are not translated.
    #[serde(default)]
    pub iommu: bool,
    /// PCI segment that the device is on.
    #[serde(default)]
    #[schema(maximum = 15)]
    pub pci_segment: u16,
    /// Slot that it is in there, 1 to 31; a free one if nothing is said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 31)]
    pub pci_device_id: Option<u8>,
    /// Name in logs and the API, as that of other devices.
    #[serde(default)]
    pub id: Option<String>,
}

impl BalloonConfig {
    /// The option.
    pub const OPTION: Field = Field::new("--balloon", "balloon");
    /// [`Self::size`].
    pub const SIZE: Field = Self::OPTION.key("size");
    /// [`Self::iommu`].
    pub const IOMMU: Field = Self::OPTION.key("iommu");

    /// The kind.
    pub const KIND: Kind = Kind {
        name: "balloon",
        field: Self::OPTION,
        number: Number::One,
        value: "size=SIZE,…",
        help: "RAM that the guest gives back: size=SIZE[,deflate_on_oom=on|off][,free_page_reporting=on|off][,pci_segment=N][,pci_device_id=N][,id=NAME]",
        bare: None,
        id: "_balloon",
        takes_slot: true,
        passed_through: false,
        iommu: None,
        default_for_clients: false,
        add: None,
        parse: |text| text.parse().map(PartConfig::Balloon),
        read: |bytes| body::parse_device(bytes, Self::OPTION).map(PartConfig::Balloon),
    };
}

impl KindConfig for BalloonConfig {
    // It cannot be behind the virtio-iommu, which its check says.
    usual_methods!(Balloon);

    fn check(&self, memory: &MemoryConfig) -> Result<(), ConfigError> {
        if self.iommu {
            let rule = "must be off, and the device on no segment of the virtio-iommu: drivers give a balloon addresses that are \
                        not translated";
            return Err(ConfigError::new(Self::IOMMU, rule));
        }
        let size = self.size;
        if !size.is_multiple_of(PAGE) {
            return Err(ConfigError::new(Self::SIZE, format!("{size} bytes are no multiple of {PAGE}")));
        }
        if size > memory.total() {
            return Err(ConfigError::in_terms(Self::SIZE, move |terms| {
                let field = match terms {
                    Terms::Options => "--memory size",
                    Terms::Json => "memory.size",
                };
                format!("{size} bytes are more than the guest has ({field})")
            }));
        }
        Ok(())
    }
}

impl FromStr for BalloonConfig {
    type Err = ConfigError;

    /// Parses `size=SIZE[,deflate_on_oom=on|off][,free_page_reporting=on|off][,iommu=off][,pci_segment=N][,pci_device_id=N][,id=NAME]`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let keys = ["size", "deflate_on_oom", "free_page_reporting", "iommu", "pci_segment", "pci_device_id", "id"];
        let list = OptionList::parse(Self::OPTION, text, &keys)?;
        list.required("size")?;
        Ok(Self {
            size: list.size("size")?.unwrap_or_default(),
            deflate_on_oom: list.toggle("deflate_on_oom", false)?,
            free_page_reporting: list.toggle("free_page_reporting", false)?,
            iommu: list.toggle("iommu", false)?,
            pci_segment: list.segment()?,
            pci_device_id: list.number("pci_device_id")?,
            id: list.get("id").map(str::to_string),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::VmConfig;
    use crate::config::PayloadConfig;
    use crate::error::Explain;

    fn balloon(text: &str) -> BalloonConfig {
        text.parse().unwrap()
    }

    #[test]
    fn balloon_parses_as_cloud_hypervisor_spells_it() {
        assert_eq!(balloon("size=1G"), serde_json::from_str(r#"{"size": 1073741824}"#).unwrap());
        let text = "size=0,deflate_on_oom=on,free_page_reporting=on,id=b,pci_segment=1";
        let json = r#"{"size": 0, "deflate_on_oom": true, "free_page_reporting": true, "id": "b", "pci_segment": 1}"#;
        assert_eq!(balloon(text), serde_json::from_str(json).unwrap());
    }

    #[test]
    fn malformed_balloons_name_option_and_rule() {
        let refused = |text: &str| text.parse::<BalloonConfig>().unwrap_err().to_string();
        assert_eq!(refused("deflate_on_oom=on"), "--balloon: 'size=' is needed");
        assert!(refused("size=much").starts_with("--balloon size: "));
        assert_eq!(refused("size=0,deflate_on_oom=yes"), "--balloon deflate_on_oom: 'yes' is neither 'on' nor 'off'");
        assert!(refused("size=0,statistics=on").starts_with("--balloon: unknown key 'statistics'"));
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

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio-rng device: random bytes of the host.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{HostFile, Kind, KindConfig, Number, PartConfig, usual_methods};
use crate::body;
use crate::error::ConfigError;
use crate::field::Field;
use crate::option_list::OptionList;

/// Where random bytes come from if nothing else is said.
const DEFAULT_SOURCE: &str = "/dev/urandom";

/// A source of random bytes for the guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RngConfig {
    /// File of the host that they are read from.
    #[serde(default = "default_source")]
    #[schema(value_type = String)]
    pub src: PathBuf,
    /// Whether the device is behind the virtio-iommu.
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

fn default_source() -> PathBuf {
    DEFAULT_SOURCE.into()
}

impl Default for RngConfig {
    fn default() -> Self {
        Self { src: default_source(), iommu: false, pci_segment: 0, pci_device_id: None, id: None }
    }
}

impl RngConfig {
    /// The option.
    pub const OPTION: Field = Field::new("--rng", "rng");
    /// [`Self::src`].
    pub const SRC: Field = Self::OPTION.key("src");

    /// The kind.
    pub const KIND: Kind = Kind {
        name: "rng",
        field: Self::OPTION,
        number: Number::One,
        value: "src=FILE,…",
        help: "Random bytes of the host: [src=/dev/urandom][,iommu=on|off][,pci_segment=N][,pci_device_id=N][,id=NAME]",
        bare: Some(""),
        id: "_rng",
        takes_slot: true,
        passed_through: false,
        iommu: Some(Self::OPTION.key("iommu")),
        default_for_clients: false,
        add: None,
        parse: |text| text.parse().map(PartConfig::Rng),
        read: |bytes| body::parse_device(bytes, Self::OPTION).map(PartConfig::Rng),
    };
}

impl KindConfig for RngConfig {
    usual_methods!(Rng);

    fn source(&self) -> Option<&Path> {
        Some(&self.src)
    }

    fn files(&self) -> Vec<HostFile<'_>> {
        vec![HostFile::Read(&self.src)]
    }
}

impl FromStr for RngConfig {
    type Err = ConfigError;

    /// Parses `[src=PATH][,iommu=on|off][,pci_segment=N][,pci_device_id=N][,id=NAME]`; the text may be empty.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let list = OptionList::parse(Self::OPTION, text, &["src", "iommu", "pci_segment", "pci_device_id", "id"])?;
        Ok(Self {
            src: list.get("src").map_or_else(default_source, PathBuf::from),
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

    #[test]
    fn source_is_the_kernels_unless_another_is_named() {
        let rng = |text: &str| text.parse::<RngConfig>().unwrap();
        assert_eq!(rng(""), serde_json::from_str("{}").unwrap());
        assert_eq!((rng("").src, rng("").pci_device_id), ("/dev/urandom".into(), None));
        let named = r#"{"src": "/dev/urandom", "pci_segment": 1, "pci_device_id": 7, "id": "r"}"#;
        assert_eq!(rng("pci_segment=1,pci_device_id=7,id=r"), serde_json::from_str(named).unwrap());
        assert_eq!(rng("iommu=on"), serde_json::from_str(r#"{"iommu": true}"#).unwrap());
        assert_eq!(rng("src=/dev/hwrng,iommu=off").src, Path::new("/dev/hwrng"));
    }

    #[test]
    fn malformed_devices_name_option_and_rule() {
        let refused = |text: &str| text.parse::<RngConfig>().unwrap_err().to_string();
        assert_eq!(refused("iommu=yes"), "--rng iommu: 'yes' is neither 'on' nor 'off'");
        assert!(refused("source=/x").starts_with("--rng: unknown key 'source'"));
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the VM uses of the host.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ConfigError;
use crate::field::Field;
use crate::limits::MAX_PCI_SEGMENTS;
use crate::option_list::OptionList;

/// What the VM uses of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlatformConfig {
    /// Whether devices of the host are reached by IOMMUFD rather than by VFIO's groups and containers.
    #[serde(default)]
    pub iommufd: bool,
    /// Whether a thread polls for requests of the virtio-iommu while they come fast.
    #[serde(default)]
    pub iommu_poll: IommuPoll,
    /// PCI segments that the guest has, 1 to 16. Devices are on segment 0, the others are empty.
    #[serde(default = "default_num_pci_segments")]
    #[schema(minimum = 1, maximum = 16)]
    pub num_pci_segments: u16,
}

fn default_num_pci_segments() -> u16 {
    1
}

/// Whether a thread polls for requests of the virtio-iommu while they come fast, rather than have vCPUs leave the guest for
/// each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum IommuPoll {
    /// If the host has more CPUs for this process than the VM boots with vCPUs, and only while it has more than there are.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

impl PlatformConfig {
    /// The option.
    pub const OPTION: Field = Field::new("--platform", "platform");
    /// [`Self::iommufd`].
    pub const IOMMUFD: Field = Self::OPTION.key("iommufd");
    /// [`Self::num_pci_segments`].
    pub const NUM_PCI_SEGMENTS: Field = Self::OPTION.key("num_pci_segments");

    /// Checks the number of segments.
    ///
    /// # Errors
    /// There are none or too many.
    pub fn check(&self) -> Result<(), ConfigError> {
        let segments = self.num_pci_segments;
        if (1..=MAX_PCI_SEGMENTS).contains(&segments) {
            return Ok(());
        }
        Err(ConfigError::new(Self::NUM_PCI_SEGMENTS, format!("{segments} is not in 1 to {MAX_PCI_SEGMENTS}")))
    }
}

impl Default for PlatformConfig {
    fn default() -> Self {
        Self { iommufd: false, iommu_poll: IommuPoll::Auto, num_pci_segments: default_num_pci_segments() }
    }
}

impl FromStr for PlatformConfig {
    type Err = ConfigError;

    /// Parses `[iommufd=on|off][,iommu_poll=auto|on|off][,num_pci_segments=N]`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let list = OptionList::parse(Self::OPTION, text, &["iommufd", "iommu_poll", "num_pci_segments"])?;
        let iommufd = list.toggle("iommufd", false)?;
        let iommu_poll = match list.get("iommu_poll") {
            None | Some("auto") => IommuPoll::Auto,
            Some("on") => IommuPoll::On,
            Some("off") => IommuPoll::Off,
            Some(other) => {
                let rule = format!("'{other}' is none of auto, on, off");
                return Err(ConfigError::new(Self::OPTION.key("iommu_poll"), rule));
            }
        };
        let num_pci_segments = list.get("num_pci_segments").map_or(Ok(default_num_pci_segments()), |number| {
            let rule = |_| ConfigError::new(Self::NUM_PCI_SEGMENTS, format!("'{number}' is no number of segments"));
            number.parse().map_err(rule)
        })?;
        Ok(Self { iommufd, iommu_poll, num_pci_segments })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_read_and_none_or_too_many_refused() {
        let segments =
            |text: &str| text.parse::<PlatformConfig>().and_then(|platform| platform.check().map(|()| platform));
        assert_eq!(segments("iommufd=on").unwrap().num_pci_segments, 1);
        assert_eq!(segments("num_pci_segments=16").unwrap().num_pci_segments, 16);
        for (text, rule) in
            [("0", "0 is not in 1 to 16"), ("17", "17 is not in 1 to 16"), ("two", "'two' is no number of segments")]
        {
            let error = segments(&format!("num_pci_segments={text}")).unwrap_err().to_string();
            assert_eq!(error, format!("--platform num_pci_segments: {rule}"));
        }
    }
}

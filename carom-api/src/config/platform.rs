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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlatformConfig {
    /// Whether devices of the host are reached by IOMMUFD rather than by VFIO's groups and containers.
    #[serde(default)]
    pub iommufd: bool,
    /// Whether a thread polls for requests of the virtio-iommu while they come fast.
    #[serde(default)]
    pub iommu_poll: IommuPoll,
    /// PCI segments that the guest has, 1 to 16. Devices are on segment 0 unless their `pci_segment` says another.
    #[serde(default = "default_num_pci_segments")]
    #[schema(minimum = 1, maximum = 16)]
    pub num_pci_segments: u16,
    /// Segments whose devices are behind the virtio-iommu, all of them, whether their `iommu` is on or not.
    #[serde(default)]
    #[schema(max_items = 16)]
    pub iommu_segments: Vec<u16>,
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

    /// [`Self::iommu_segments`].
    pub const IOMMU_SEGMENTS: Field = Self::OPTION.key("iommu_segments");

    /// Checks the number of segments, and those behind the virtio-iommu.
    ///
    /// # Errors
    /// There are none or too many, or one is not among them or given twice.
    pub fn check(&self) -> Result<(), ConfigError> {
        let segments = self.num_pci_segments;
        if !(1..=MAX_PCI_SEGMENTS).contains(&segments) {
            let rule = format!("{segments} is not in 1 to {MAX_PCI_SEGMENTS}");
            return Err(ConfigError::new(Self::NUM_PCI_SEGMENTS, rule));
        }
        for (place, segment) in self.iommu_segments.iter().enumerate() {
            self.check_segment(Self::IOMMU_SEGMENTS, *segment)?;
            if self.iommu_segments[..place].contains(segment) {
                return Err(ConfigError::new(Self::IOMMU_SEGMENTS, format!("{segment} is given twice")));
            }
        }
        Ok(())
    }

    /// Checks that there is a segment which `field` names.
    ///
    /// # Errors
    /// There is not.
    pub fn check_segment(&self, field: Field, segment: u16) -> Result<(), ConfigError> {
        if segment < self.num_pci_segments {
            return Ok(());
        }
        let last = self.num_pci_segments.saturating_sub(1);
        Err(ConfigError::in_terms(field, |terms| {
            let number = Self::NUM_PCI_SEGMENTS.name(terms);
            format!("there is no segment {segment}, the last is {last} ({number})")
        }))
    }
}

impl Default for PlatformConfig {
    fn default() -> Self {
        Self {
            iommufd: false,
            iommu_poll: IommuPoll::Auto,
            num_pci_segments: default_num_pci_segments(),
            iommu_segments: Vec::new(),
        }
    }
}

impl FromStr for PlatformConfig {
    type Err = ConfigError;

    /// Parses `[iommufd=on|off][,iommu_poll=auto|on|off][,num_pci_segments=N][,iommu_segments=LIST]`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let list =
            OptionList::parse(Self::OPTION, text, &["iommufd", "iommu_poll", "num_pci_segments", "iommu_segments"])?;
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
        let iommu_segments = list.numbers("iommu_segments")?.unwrap_or_default();
        Ok(Self { iommufd, iommu_poll, num_pci_segments, iommu_segments })
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
        let iommu = |text: &str| segments(&format!("num_pci_segments=3,iommu_segments={text}"));
        assert_eq!(iommu("[0,2]").unwrap().iommu_segments, [0, 2]);
        assert_eq!(iommu("1").unwrap().iommu_segments, [1]);
        for (text, rule) in [
            ("3", "there is no segment 3, the last is 2 (--platform num_pci_segments)"),
            ("[1,0-1]", "1 is given twice"),
            ("[x]", "'[x]' is no number and no list of them, such as [0,2-4]"),
        ] {
            assert_eq!(iommu(text).unwrap_err().to_string(), format!("--platform iommu_segments: {rule}"));
        }
    }
}

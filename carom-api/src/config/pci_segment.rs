// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Shares of the BAR address space for each PCI segment.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::PlatformConfig;
use crate::error::{ConfigError, ensure};
use crate::field::Field;
use crate::left_out::number;
use crate::option_list::from_option;

/// Share of the BAR address space for one PCI segment. The address space is divided among all segments, in proportion to their weights.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PciSegmentConfig {
    /// Number of the segment.
    #[schema(maximum = 15)]
    pub pci_segment: u16,
    /// Weight of the segment for BAR addresses below 4 GiB, 1 to 1024.
    #[serde(default = "number::<1, _>")]
    #[schema(minimum = 1, maximum = 1024)]
    pub mmio32_aperture_weight: u32,
    /// Weight of the segment for BAR addresses above 4 GiB, 1 to 1024.
    #[serde(default = "number::<1, _>")]
    #[schema(minimum = 1, maximum = 1024)]
    pub mmio64_aperture_weight: u32,
}

/// Maximum weight. With this maximum, even the smallest possible share below 4 GiB has room for the BARs of a few devices.
const MAX_WEIGHT: u32 = 1024;

impl PciSegmentConfig {
    /// Option and JSON field of this configuration.
    pub const OPTION: Field = Field::new("--pci-segment", "pci_segments");
    /// [`Self::pci_segment`].
    pub const PCI_SEGMENT: Field = Self::OPTION.key("pci_segment");

    /// Checks the segment number and the weights.
    ///
    /// # Errors
    /// The segment does not exist, or a weight is out of range.
    pub fn check(&self, platform: &PlatformConfig) -> Result<(), ConfigError> {
        platform.check_segment(Self::PCI_SEGMENT, self.pci_segment)?;
        let weights = [
            ("mmio32_aperture_weight", self.mmio32_aperture_weight),
            ("mmio64_aperture_weight", self.mmio64_aperture_weight),
        ];
        for (key, weight) in weights {
            let fits = (1..=MAX_WEIGHT).contains(&weight);
            ensure(fits, Self::OPTION.key(key), || format!("{weight} is not between 1 and {MAX_WEIGHT}"))?;
        }
        Ok(())
    }
}

from_option!(PciSegmentConfig);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_default_to_one_and_zero_is_refused() {
        let platform = PlatformConfig { num_pci_segments: 2, ..PlatformConfig::default() };
        let read = |text: &str| {
            let segment: PciSegmentConfig = text.parse()?;
            segment.check(&platform).map(|()| segment)
        };
        let refused = |text: &str| read(text).unwrap_err().to_string();
        assert!(read("pci_segment=1,mmio32_aperture_weight=8").is_ok());
        assert!(refused("pci_segment=2").starts_with("--pci-segment pci_segment: segment 2 does not exist"));
        for key in ["mmio32_aperture_weight", "mmio64_aperture_weight"] {
            for weight in ["0", "1025"] {
                let error = refused(&format!("pci_segment=1,{key}={weight}"));
                assert_eq!(error, format!("--pci-segment {key}: {weight} is not between 1 and 1024"));
            }
        }
    }
}

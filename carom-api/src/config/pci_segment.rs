// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How much of the addresses for BARs a PCI segment has.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::PlatformConfig;
use crate::error::{ConfigError, ensure};
use crate::field::Field;
use crate::left_out::number;
use crate::option_list::from_option;

/// How much of the addresses for BARs a PCI segment has. Those of all segments are as their weights.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PciSegmentConfig {
    /// The segment.
    #[schema(maximum = 15)]
    pub pci_segment: u16,
    /// Its part of the addresses below 4 GiB, by weight.
    #[serde(default = "number::<1, _>")]
    #[schema(minimum = 1, maximum = 1024)]
    pub mmio32_aperture_weight: u32,
    /// Its part of those above.
    #[serde(default = "number::<1, _>")]
    #[schema(minimum = 1, maximum = 1024)]
    pub mmio64_aperture_weight: u32,
}

/// Largest weight. The least part of the addresses below 4 GiB has room for the BARs of a few devices then.
const MAX_WEIGHT: u32 = 1024;

impl PciSegmentConfig {
    /// The option.
    pub const OPTION: Field = Field::new("--pci-segment", "pci_segments");
    /// [`Self::pci_segment`].
    pub const PCI_SEGMENT: Field = Self::OPTION.key("pci_segment");

    /// Checks it beside the number of segments.
    ///
    /// # Errors
    /// There is no such segment, or a weight is none.
    pub fn check(&self, platform: &PlatformConfig) -> Result<(), ConfigError> {
        platform.check_segment(Self::PCI_SEGMENT, self.pci_segment)?;
        let weights = [
            ("mmio32_aperture_weight", self.mmio32_aperture_weight),
            ("mmio64_aperture_weight", self.mmio64_aperture_weight),
        ];
        for (key, weight) in weights {
            let fits = (1..=MAX_WEIGHT).contains(&weight);
            ensure(fits, Self::OPTION.key(key), || format!("{weight} is not in 1 to {MAX_WEIGHT}"))?;
        }
        Ok(())
    }
}

from_option!(PciSegmentConfig);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_one_unless_said_and_never_none() {
        let platform = PlatformConfig { num_pci_segments: 2, ..PlatformConfig::default() };
        let read = |text: &str| {
            let segment: PciSegmentConfig = text.parse()?;
            segment.check(&platform).map(|()| segment)
        };
        let refused = |text: &str| read(text).unwrap_err().to_string();
        assert!(read("pci_segment=1,mmio32_aperture_weight=8").is_ok());
        assert!(refused("pci_segment=2").starts_with("--pci-segment pci_segment: there is no segment 2"));
        for key in ["mmio32_aperture_weight", "mmio64_aperture_weight"] {
            for weight in ["0", "1025"] {
                let error = refused(&format!("pci_segment=1,{key}={weight}"));
                assert_eq!(error, format!("--pci-segment {key}: {weight} is not in 1 to 1024"));
            }
        }
    }
}

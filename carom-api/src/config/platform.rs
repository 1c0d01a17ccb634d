// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the VM uses of the host.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ConfigError;
use crate::field::Field;
use crate::option_list::OptionList;

/// What the VM uses of the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlatformConfig {
    /// Whether devices of the host are reached by IOMMUFD rather than by VFIO's groups and containers.
    #[serde(default)]
    pub iommufd: bool,
    /// Whether a thread polls for requests of the virtio-iommu while they come fast.
    #[serde(default)]
    pub iommu_poll: IommuPoll,
}

/// Whether a thread polls for requests of the virtio-iommu while they come fast, rather than have vCPUs leave the guest for
/// each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum IommuPoll {
    /// If the host has more CPUs for this process than the VM has vCPUs.
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
}

impl FromStr for PlatformConfig {
    type Err = ConfigError;

    /// Parses `[iommufd=on|off][,iommu_poll=auto|on|off]`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let list = OptionList::parse(Self::OPTION, text, &["iommufd", "iommu_poll"])?;
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
        Ok(Self { iommufd, iommu_poll })
    }
}

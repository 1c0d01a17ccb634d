// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! PCI devices of the host, by VFIO.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Add, HostFile, Kind, KindConfig, Number, PartConfig, usual_methods};
use crate::body;
use crate::error::ConfigError;
use crate::field::Field;
use crate::option_list::OptionList;

/// A device of the host that the guest is given.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeviceConfig {
    /// Directory of the device in sysfs.
    #[schema(value_type = String)]
    pub path: PathBuf,
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
    /// Name in logs and the API, not empty and without `_` at its start. Names that are not given are made up.
    #[serde(default)]
    pub id: Option<String>,
}

impl DeviceConfig {
    /// The option.
    pub const OPTION: Field = Field::new("--device", "devices");
    /// [`Self::path`].
    pub const PATH: Field = Self::OPTION.key("path");
    /// [`Self::iommu`].
    pub const IOMMU: Field = Self::OPTION.key("iommu");

    /// The kind.
    pub const KIND: Kind = Kind {
        name: "vfio",
        field: Self::OPTION,
        number: Number::Many,
        value: "path=DIR,…",
        help: "PCI device to pass through, bound to vfio-pci: path=DIR[,iommu=on|off][,pci_segment=N][,pci_device_id=N][,id=NAME]",
        bare: None,
        id: "_vfio",
        takes_slot: true,
        passed_through: true,
        iommu: Some(Self::IOMMU),
        default_for_clients: false,
        add: Some(Add {
            operation: "vm.add-device",
            id: "addDeviceVM",
            summary: "Adds a device, to a running VM too.",
            schema: "DeviceConfig",
            verb: "add-device",
            about: "Add a device, to a running guest too: path=DIR[,iommu=on|off][,pci_segment=N][,pci_device_id=N][,id=NAME]",
        }),
        parse: |text| text.parse().map(PartConfig::Vfio),
        read: |bytes| body::parse_device(bytes, Self::OPTION).map(PartConfig::Vfio),
    };
}

impl KindConfig for DeviceConfig {
    usual_methods!(Vfio);

    fn source(&self) -> Option<&Path> {
        Some(&self.path)
    }

    fn files(&self) -> Vec<HostFile<'_>> {
        vec![HostFile::Function(&self.path)]
    }

    fn exclusive(&self) -> Option<Field> {
        Some(Self::PATH)
    }
}

impl FromStr for DeviceConfig {
    type Err = ConfigError;

    /// Parses `path=PATH[,iommu=on|off][,pci_segment=N][,pci_device_id=N][,id=NAME]`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let list = OptionList::parse(Self::OPTION, text, &["path", "iommu", "pci_segment", "pci_device_id", "id"])?;
        Ok(Self {
            path: list.required("path")?.into(),
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
    fn device_parses_as_cloud_hypervisor_spells_it() {
        let device: DeviceConfig = "path=/sys/bus/pci/devices/0000:00:05.0,iommu=on".parse().unwrap();
        assert!(device.iommu);
        assert_eq!(device.path, PathBuf::from("/sys/bus/pci/devices/0000:00:05.0"));
    }

    #[test]
    fn malformed_devices_name_option_and_rule() {
        let refused = |text: &str| text.parse::<DeviceConfig>().unwrap_err().to_string();
        assert_eq!(refused("iommu=on"), "--device: 'path=' is needed");
        assert_eq!(refused("path=/x,iommu=yes"), "--device iommu: 'yes' is neither 'on' nor 'off'");
    }
}

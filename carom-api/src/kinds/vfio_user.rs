// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! PCI devices that other processes of the host emulate, by vfio-user.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Add, Kind, KindConfig, Number, PartConfig, usual_methods};
use crate::body;
use crate::config::MemoryConfig;
use crate::error::ConfigError;
use crate::field::Field;
use crate::option_list::OptionList;

/// A device that another process of the host emulates, a vfio-user server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UserDeviceConfig {
    /// Socket that the server listens on.
    #[schema(value_type = String)]
    pub socket: PathBuf,
    /// Whether the device is behind the virtio-iommu. Otherwise the server is given all guest RAM, which must be shared.
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

impl UserDeviceConfig {
    /// The option.
    pub const OPTION: Field = Field::new("--user-device", "user_devices");
    /// [`Self::socket`].
    pub const SOCKET: Field = Self::OPTION.key("socket");
    /// [`Self::iommu`].
    pub const IOMMU: Field = Self::OPTION.key("iommu");

    /// The kind.
    pub const KIND: Kind = Kind {
        name: "vfio-user",
        field: Self::OPTION,
        number: Number::Many,
        value: "socket=FILE,…",
        help: "PCI device that another process emulates, a vfio-user server: socket=FILE[,iommu=on|off][,pci_segment=N][,pci_device_id=N][,id=NAME]",
        bare: None,
        id: "_vfio_user",
        takes_slot: true,
        passed_through: true,
        iommu: Some(Self::IOMMU),
        default_for_clients: false,
        add: Some(Add {
            operation: "vm.add-user-device",
            id: "addUserDeviceVM",
            summary: "Adds a device that another process emulates, to a running VM too.",
            schema: "UserDeviceConfig",
            verb: "add-user-device",
            about: "Add a device that another process emulates, to a running guest too: socket=FILE[,iommu=on|off][,pci_segment=N][,pci_device_id=N][,id=NAME]",
        }),
        parse: |text| text.parse().map(PartConfig::VfioUser),
        read: |bytes| body::parse_device(bytes, Self::OPTION).map(PartConfig::VfioUser),
    };
}

impl KindConfig for UserDeviceConfig {
    usual_methods!(VfioUser);

    fn source(&self) -> Option<&Path> {
        Some(&self.socket)
    }

    fn exclusive(&self) -> Option<Field> {
        Some(Self::SOCKET)
    }

    fn check(&self, memory: &MemoryConfig) -> Result<(), ConfigError> {
        if self.iommu || memory.can_be_shared() {
            return Ok(());
        }
        Err(ConfigError::in_terms(Self::IOMMU, |terms| {
            let shared = MemoryConfig::SHARED.turned_on(terms);
            format!(
                "is off, so that the server is given all guest RAM, which needs {shared}; or turn it on, and the server \
                 reaches what the guest maps"
            )
        }))
    }
}

impl FromStr for UserDeviceConfig {
    type Err = ConfigError;

    /// Parses `socket=PATH[,iommu=on|off][,pci_segment=N][,pci_device_id=N][,id=NAME]`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let list = OptionList::parse(Self::OPTION, text, &["socket", "iommu", "pci_segment", "pci_device_id", "id"])?;
        Ok(Self {
            socket: list.required("socket")?.into(),
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
    use crate::error::Explain;
    use crate::field::Terms;
    use crate::limits::MIB;

    #[test]
    fn malformed_devices_name_option_and_rule() {
        let refused = |text: &str| text.parse::<UserDeviceConfig>().unwrap_err().to_string();
        assert_eq!(refused("iommu=on"), "--user-device: 'socket=' is needed");
        assert!(refused("path=/s").starts_with("--user-device: unknown key 'path'"));
    }

    #[test]
    fn device_beside_the_iommu_needs_memory_that_can_be_shared() {
        let private = MemoryConfig::with_size(512 * MIB);
        let beside: UserDeviceConfig = "socket=/s".parse().unwrap();
        let error = beside.check(&private).unwrap_err();
        let json = error.explain(Terms::Json);
        assert!(json.starts_with("user_devices.iommu: is off") && json.contains("memory.shared to be true"), "{json}");
        assert!(!json.contains("--"), "{json}");
        let error = error.to_string();
        assert!(error.starts_with("--user-device iommu: is off") && error.contains("--memory shared=on"), "{error}");
        let shared = MemoryConfig { shared: true, ..private.clone() };
        let hugepages = MemoryConfig { hugepages: true, ..private.clone() };
        assert_eq!((beside.check(&shared), beside.check(&hugepages)), (Ok(()), Ok(())));
        let behind = UserDeviceConfig { iommu: true, ..beside };
        assert_eq!(behind.check(&private), Ok(()));
    }
}

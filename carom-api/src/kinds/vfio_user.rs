// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! PCI devices that other host processes emulate (vfio-user).

use std::path::{Path, PathBuf};

use super::{Add, Kind, KindConfig, Number, device_config, usual_methods};
use crate::config::MemoryConfig;
use crate::error::{ConfigError, ensure_in_terms};
use crate::field::{Field, keys};
use crate::option_list::from_option;

device_config! {
    /// Device that another host process (a vfio-user server) emulates.
    pub struct UserDeviceConfig {
        /// Socket on which the vfio-user server listens.
        #[schema(value_type = String)]
        pub socket: PathBuf,
        /// True if the device is behind the virtio-iommu. Otherwise the server gets access to all guest RAM, which must be
        /// shared.
        #[serde(default)]
        pub iommu: bool,
    }
}

impl UserDeviceConfig {
    /// Option and JSON field of this configuration.
    pub const OPTION: Field = Field::new("--user-device", "user_devices");
    keys! { SOCKET = "socket", IOMMU = "iommu" }

    /// Registry entry of this kind of device.
    pub const KIND: Kind = Kind {
        value: "socket=FILE,…",
        help: "PCI device that another process (a vfio-user server) emulates",
        keys: "socket=FILE[,iommu=on|off]",
        passed_through: true,
        add: Some(Add {
            operation: "vm.add-user-device",
            id: "addUserDeviceVM",
            summary: "Adds a device that another process emulates, also to a running VM.",
            schema: "UserDeviceConfig",
            about: "Add a device that another process emulates, also to a running guest",
        }),
        ..Kind::of::<Self>("vfio-user", "_vfio_user", Number::Many)
    };
}

impl KindConfig for UserDeviceConfig {
    usual_methods!();

    fn source(&self) -> Option<&Path> {
        Some(&self.socket)
    }

    fn exclusive(&self) -> Option<Field> {
        Some(Self::SOCKET)
    }

    fn check(&self, memory: &MemoryConfig) -> Result<(), ConfigError> {
        ensure_in_terms(self.iommu || memory.can_be_shared(), Self::IOMMU, |terms| {
            let shared = MemoryConfig::SHARED.turned_on(terms);
            format!(
                "is off, so the server must be able to map all guest RAM: the device needs {shared}. With iommu on, the \
                 server needs access only to memory that the guest maps"
            )
        })
    }
}

from_option!(UserDeviceConfig);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Explain;
    use crate::field::Terms;
    use crate::limits::MIB;

    #[test]
    fn device_not_behind_the_iommu_needs_shared_memory() {
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

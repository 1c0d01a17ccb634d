// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! PCI devices of the host, passed through with VFIO.

use std::path::{Path, PathBuf};

use super::{Add, HostFile, Kind, KindConfig, Number, device_config, usual_methods};
use crate::field::{Field, keys};
use crate::option_list::from_option;

device_config! {
    id " Name in logs and the API. Must not be empty or start with `_`. By default, the VMM generates a name.";
    /// Host device passed through to the VM.
    pub struct DeviceConfig {
        /// Sysfs directory of the device.
        #[schema(value_type = String)]
        pub path: PathBuf,
        /// True if the device is behind the virtio-iommu.
        #[serde(default)]
        pub iommu: bool,
    }
}

impl DeviceConfig {
    /// Option and JSON field of this configuration.
    pub const OPTION: Field = Field::new("--device", "devices");
    keys! { PATH = "path", IOMMU = "iommu" }

    /// Registry entry of this kind of device.
    pub const KIND: Kind = Kind {
        value: "path=DIR,…",
        help: "PCI device to pass through, bound to vfio-pci",
        keys: "path=DIR[,iommu=on|off]",
        passed_through: true,
        add: Some(Add {
            operation: "vm.add-device",
            id: "addDeviceVM",
            summary: "Adds a host device, also to a running VM.",
            schema: "DeviceConfig",
            about: "Add a host device, also to a running guest",
        }),
        ..Kind::of::<Self>("vfio", "_vfio", Number::Many)
    };
}

impl KindConfig for DeviceConfig {
    usual_methods!();

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

from_option!(DeviceConfig);

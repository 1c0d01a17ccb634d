// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! PCI devices of the host, by VFIO.

use std::path::{Path, PathBuf};

use super::{Add, HostFile, Kind, KindConfig, Number, device_config, usual_methods};
use crate::field::{Field, keys};
use crate::option_list::from_option;

device_config! {
    id " Name in logs and the API, not empty and without `_` at its start. Names that are not given are made up.";
    /// A device of the host that the guest is given.
    pub struct DeviceConfig {
        /// Directory of the device in sysfs.
        #[schema(value_type = String)]
        pub path: PathBuf,
        /// True if the device is behind the virtio-iommu.
        #[serde(default)]
        pub iommu: bool,
    }
}

impl DeviceConfig {
    /// The option.
    pub const OPTION: Field = Field::new("--device", "devices");
    keys! { PATH = "path", IOMMU = "iommu" }

    /// The kind.
    pub const KIND: Kind = Kind {
        value: "path=DIR,…",
        help: "PCI device to pass through, bound to vfio-pci",
        keys: "path=DIR[,iommu=on|off]",
        passed_through: true,
        add: Some(Add {
            operation: "vm.add-device",
            id: "addDeviceVM",
            summary: "Adds a device, to a running VM too.",
            schema: "DeviceConfig",
            about: "Add a device, to a running guest too",
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

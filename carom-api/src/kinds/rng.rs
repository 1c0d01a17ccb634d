// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio-rng device: random bytes from the host.

use std::path::{Path, PathBuf};

use super::{HostFile, Kind, KindConfig, Number, device_config, usual_methods};
use crate::field::Field;
use crate::option_list::from_option;

/// Default file for random bytes.
const DEFAULT_SOURCE: &str = "/dev/urandom";

device_config! {
    /// A source of random bytes for the guest.
    pub struct RngConfig {
        /// Host file that supplies the random bytes.
        #[serde(default = "default_source")]
        #[schema(value_type = String)]
        pub src: PathBuf,
        /// True if the device is behind the virtio-iommu.
        #[serde(default)]
        pub iommu: bool,
    }
}

fn default_source() -> PathBuf {
    DEFAULT_SOURCE.into()
}

impl RngConfig {
    /// Option and JSON field of this configuration.
    pub const OPTION: Field = Field::new("--rng", "rng");
    /// [`Self::src`].
    pub const SRC: Field = Self::OPTION.key("src");

    /// Registry entry of this kind of device.
    pub const KIND: Kind = Kind {
        value: "src=FILE,…",
        help: "Random bytes from the host",
        keys: "[src=/dev/urandom][,iommu=on|off]",
        bare: Some(""),
        ..Kind::of::<Self>("rng", "_rng", Number::One)
    };
}

impl KindConfig for RngConfig {
    usual_methods!();

    fn source(&self) -> Option<&Path> {
        Some(&self.src)
    }

    fn files(&self) -> Vec<HostFile<'_>> {
        vec![HostFile::Read(&self.src)]
    }
}

from_option!(RngConfig);

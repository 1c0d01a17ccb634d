// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio-console device: a terminal for the guest.

use std::path::{Path, PathBuf};

use super::{HostFile, Kind, KindConfig, Number, device_config, usual_methods};
use crate::config::{ConsoleMode, MemoryConfig, console_option};
use crate::error::ConfigError;
use crate::field::Field;

device_config! {
    /// Paravirtual terminal of the guest. By default, a VM of an API client has a console with mode Tty.
    pub struct ConsoleConfig {
        /// Backend of the console. With `Off`, the VM has no such device.
        pub mode: ConsoleMode,
        /// Path of the file for mode `File`. With mode `Pty`, `vm.info` reports the path of the pseudoterminal in this field.
        #[schema(value_type = Option<String>)]
        pub file: Option<PathBuf>,
        /// Path of the unix socket for mode `Socket`.
        #[schema(value_type = Option<String>)]
        pub socket: Option<PathBuf>,
        /// True if the device is behind the virtio-iommu.
        #[serde(default)]
        pub iommu: bool,
    }
}

impl ConsoleConfig {
    /// Option and JSON field of this configuration.
    pub const OPTION: Field = Field::new("--console", "console");

    /// Registry entry of this kind of device.
    pub const KIND: Kind = Kind {
        value: "MODE,…",
        help: "Paravirtual console hvc0 (default: off, or tty if the program is called cloud-hypervisor)",
        keys: "off, null, tty, pty, file=PATH or socket=PATH, then [,iommu=on|off]",
        ..Kind::of::<Self>("console", "_console", Number::One)
    };

    /// Returns a configuration with this mode, without a file or socket, and not behind the virtio-iommu.
    pub const fn of(mode: ConsoleMode) -> Self {
        Self { mode, file: None, socket: None, iommu: false, pci_segment: 0, pci_device_id: None, id: None }
    }
}

impl KindConfig for ConsoleConfig {
    usual_methods!();

    fn is_there(&self) -> bool {
        self.mode != ConsoleMode::Off
    }

    fn source(&self) -> Option<&Path> {
        self.file.as_deref().or(self.socket.as_deref())
    }

    /// Returns no files, because the VMM makes the Landlock rules of this console together with the rules of the serial port.
    fn files(&self) -> Vec<HostFile<'_>> {
        Vec::new()
    }

    fn check(&self, _: &MemoryConfig) -> Result<(), ConfigError> {
        self.target().check()
    }
}

console_option!(ConsoleConfig);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn console_that_is_off_is_no_device() {
        assert!(!ConsoleConfig::of(ConsoleMode::Off).is_there() && ConsoleConfig::of(ConsoleMode::Null).is_there());
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio-console device: a terminal for the guest.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{HostFile, Kind, KindConfig, Number, PartConfig, usual_methods};
use crate::body;
use crate::config::{ConsoleMode, ConsoleTarget, MemoryConfig, ReadTarget};
use crate::error::ConfigError;
use crate::field::Field;

/// A terminal for the guest. A VM whose configuration says nothing of it has one with mode Tty.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConsoleConfig {
    /// Where it goes. With Off there is no such device.
    pub mode: ConsoleMode,
    /// The file of [`ConsoleMode::File`]; in answers, also the path of the pseudoterminal of [`ConsoleMode::Pty`].
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub file: Option<PathBuf>,
    /// The socket of [`ConsoleMode::Socket`].
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub socket: Option<PathBuf>,
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
    /// Name in logs and the API, as that of other devices.
    #[serde(default)]
    pub id: Option<String>,
}

impl ConsoleConfig {
    /// The option.
    pub const OPTION: Field = Field::new("--console", "console");

    /// The kind.
    pub const KIND: Kind = Kind {
        name: "console",
        field: Self::OPTION,
        number: Number::One,
        value: "MODE,…",
        help: "Paravirtual console (hvc0): off, null, tty, pty, file=PATH or socket=PATH, then [,iommu=on|off][,pci_segment=N][,pci_device_id=N][,id=NAME]; off \
               where nothing is said, tty under the name cloud-hypervisor",
        bare: None,
        id: "_console",
        takes_slot: true,
        passed_through: false,
        iommu: Some(Self::OPTION.key("iommu")),
        default_for_clients: false,
        add: None,
        parse: |text| text.parse().map(PartConfig::Console),
        read: |bytes| body::parse_device(bytes, Self::OPTION).map(PartConfig::Console),
    };

    /// This mode, beside the virtio-iommu, with no file and no socket.
    pub const fn of(mode: ConsoleMode) -> Self {
        Self { mode, file: None, socket: None, iommu: false, pci_segment: 0, pci_device_id: None, id: None }
    }

    /// Where it goes.
    pub fn target(&self) -> ConsoleTarget<'_> {
        ConsoleTarget {
            option: Self::OPTION,
            mode: self.mode,
            file: self.file.as_deref(),
            socket: self.socket.as_deref(),
        }
    }
}

impl KindConfig for ConsoleConfig {
    usual_methods!(Console);

    fn is_there(&self) -> bool {
        self.mode != ConsoleMode::Off
    }

    fn source(&self) -> Option<&Path> {
        self.file.as_deref().or(self.socket.as_deref())
    }

    /// They are allowed as those of the serial port are.
    fn files(&self) -> Vec<HostFile<'_>> {
        Vec::new()
    }

    fn check(&self, _: &MemoryConfig) -> Result<(), ConfigError> {
        self.target().check()
    }
}

impl FromStr for ConsoleConfig {
    type Err = ConfigError;

    /// Parses `off|null|tty|pty|file=PATH|socket=PATH[,iommu=on|off][,pci_segment=N][,pci_device_id=N][,id=NAME]`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let keys = ["file", "socket", "iommu", "pci_segment", "pci_device_id", "id"];
        let ReadTarget { mode, file, socket, list } = ReadTarget::parse(Self::OPTION, text, &keys)?;
        Ok(Self {
            mode,
            file,
            socket,
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
    fn modes_parse_as_cloud_hypervisor_spells_them() {
        let console = |text: &str| text.parse::<ConsoleConfig>().unwrap();
        for (word, mode) in ReadTarget::WORDS {
            assert_eq!(console(word), ConsoleConfig::of(mode));
        }
        let json = r#"{"mode": "Pty", "iommu": true, "pci_segment": 1, "id": "c"}"#;
        assert_eq!(console("pty,iommu=on,pci_segment=1,id=c"), serde_json::from_str(json).unwrap());
        assert_eq!(console("iommu=on,tty"), serde_json::from_str(r#"{"mode": "Tty", "iommu": true}"#).unwrap());
        assert_eq!(console("file=/f"), serde_json::from_str(r#"{"mode": "File", "file": "/f"}"#).unwrap());
        assert_eq!(console("socket=/s"), serde_json::from_str(r#"{"mode": "Socket", "socket": "/s"}"#).unwrap());
    }

    #[test]
    fn malformed_consoles_name_option_and_rule() {
        let refused = |text: &str| text.parse::<ConsoleConfig>().unwrap_err().to_string();
        for text in ["iommu=on", "tty,pty", "file=/f,tty", "file=", "file=/f,socket=/s"] {
            let rule = "has not one of off, null, tty, pty, file=PATH, socket=PATH";
            assert_eq!(refused(text), format!("--console: '{text}' {rule}"));
        }
        assert_eq!(refused("vga"), "--console: 'vga' is neither key=value nor one of off, null, tty, pty");
        assert_eq!(refused("tty,iommu=yes"), "--console iommu: 'yes' is neither 'on' nor 'off'");
        assert!(refused("pty=/p").starts_with("--console: unknown key 'pty'"));
    }

    #[test]
    fn console_that_is_off_is_no_device() {
        assert!(!ConsoleConfig::of(ConsoleMode::Off).is_there() && ConsoleConfig::of(ConsoleMode::Null).is_there());
    }
}

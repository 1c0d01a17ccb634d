// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio-vsock device: sockets between guest and host.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Add, HostFile, Kind, KindConfig, Number, PartConfig, usual_methods};
use crate::body;
use crate::config::MemoryConfig;
use crate::error::ConfigError;
use crate::field::Field;
use crate::option_list::OptionList;

/// CIDs that a guest may have: those below are the hypervisor's, a local one's and the host's, and the last one stands for any.
const CIDS: std::ops::RangeInclusive<u64> = 3..=u32::MAX as u64 - 1;
/// Most bytes of a socket's path, as the host's kernel has it.
const MAX_PATH: usize = 107;

/// Sockets between guest and host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VsockConfig {
    /// The guest's context ID, 3 to 4294967294.
    #[schema(minimum = 3, maximum = 4294967294_u64)]
    pub cid: u64,
    /// Socket on which the host's programs reach the guest: it is made, and nothing may be there. A port of the host's that the guest
    /// connects to is the socket of this name with `_` and the port behind it.
    #[schema(value_type = String)]
    pub socket: PathBuf,
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

impl VsockConfig {
    /// The option.
    pub const OPTION: Field = Field::new("--vsock", "vsock");
    /// [`Self::cid`].
    pub const CID: Field = Self::OPTION.key("cid");
    /// [`Self::socket`].
    pub const SOCKET: Field = Self::OPTION.key("socket");

    /// The kind.
    pub const KIND: Kind = Kind {
        name: "vsock",
        field: Self::OPTION,
        number: Number::One,
        value: "cid=N,socket=FILE,…",
        help: "Sockets between guest and host: cid=N,socket=FILE[,iommu=on|off][,pci_segment=N][,pci_device_id=N][,id=NAME]",
        bare: None,
        id: "_vsock",
        takes_slot: true,
        passed_through: false,
        iommu: Some(Self::OPTION.key("iommu")),
        default_for_clients: false,
        add: Some(Add {
            operation: "vm.add-vsock",
            id: "addVsockVM",
            summary: "Adds sockets between guest and host, to a running VM too. A VM has one such device.",
            schema: "VsockConfig",
            verb: "add-vsock",
            about: "Add sockets between guest and host, to a running guest too: cid=N,socket=FILE[,iommu=on|off][,pci_segment=N][,pci_device_id=N][,id=NAME]",
        }),
        parse: |text| text.parse().map(PartConfig::Vsock),
        read: |bytes| body::parse_device(bytes, Self::OPTION).map(PartConfig::Vsock),
    };
}

impl KindConfig for VsockConfig {
    usual_methods!(Vsock);

    fn source(&self) -> Option<&Path> {
        Some(&self.socket)
    }

    fn files(&self) -> Vec<HostFile<'_>> {
        vec![HostFile::Socket(&self.socket)]
    }

    fn check(&self, _: &MemoryConfig) -> Result<(), ConfigError> {
        let path = self.socket.as_os_str().as_bytes();
        if !CIDS.contains(&self.cid) {
            let rule = format!("{} is not {} to {}", self.cid, CIDS.start(), CIDS.end());
            return Err(ConfigError::new(Self::CID, rule));
        }
        if path.is_empty() || path.len() > MAX_PATH || path.contains(&0) {
            let rule = format!("is no path of 1 to {MAX_PATH} bytes, none of them zero");
            return Err(ConfigError::new(Self::SOCKET, rule));
        }
        Ok(())
    }
}

impl FromStr for VsockConfig {
    type Err = ConfigError;

    /// Parses `cid=N,socket=PATH[,iommu=on|off][,pci_segment=N][,pci_device_id=N][,id=NAME]`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let list =
            OptionList::parse(Self::OPTION, text, &["cid", "socket", "iommu", "pci_segment", "pci_device_id", "id"])?;
        let cid = list.required("cid")?.parse().map_err(|_| ConfigError::new(Self::CID, "is no number that fits"))?;
        Ok(Self {
            cid,
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

    fn vsock(text: &str) -> VsockConfig {
        text.parse().unwrap()
    }

    #[test]
    fn vsock_parses_as_cloud_hypervisor_spells_it() {
        let plain = vsock("cid=3,socket=/run/vm.vsock");
        assert_eq!(plain, serde_json::from_str(r#"{"cid": 3, "socket": "/run/vm.vsock"}"#).unwrap());
        assert_eq!((plain.iommu, plain.id.as_deref()), (false, None));
        let text = "cid=4294967294,socket=/s,iommu=on,pci_segment=0,id=v";
        let json = r#"{"cid": 4294967294, "socket": "/s", "iommu": true, "id": "v"}"#;
        assert_eq!(vsock(text), serde_json::from_str(json).unwrap());
    }

    #[test]
    fn malformed_devices_name_option_and_rule() {
        let refused = |text: &str| text.parse::<VsockConfig>().unwrap_err().to_string();
        assert_eq!(refused("socket=/s"), "--vsock: 'cid=' is needed");
        assert_eq!(refused("cid=3"), "--vsock: 'socket=' is needed");
        assert_eq!(refused("cid=three,socket=/s"), "--vsock cid: is no number that fits");
        assert_eq!(refused("cid=3,socket=/s,pci_segment=65536"), "--vsock pci_segment: is no number that fits");
        assert!(refused("cid=3,path=/s").starts_with("--vsock: unknown key 'path'"));
    }

    #[test]
    fn cids_and_paths_that_cannot_be_are_refused() {
        let refused = |config: &VsockConfig| config.check(&MemoryConfig::default()).unwrap_err().explain(Terms::Json);
        for cid in [0, 1, 2, u64::from(u32::MAX), u64::MAX] {
            let config = VsockConfig { cid, ..vsock("cid=3,socket=/s") };
            assert_eq!(refused(&config), format!("vsock.cid: {cid} is not 3 to 4294967294"));
        }
        for socket in [String::new(), "x".repeat(108), "a\0b".into()] {
            let config = VsockConfig { socket: socket.into(), ..vsock("cid=3,socket=/s") };
            assert_eq!(refused(&config), "vsock.socket: is no path of 1 to 107 bytes, none of them zero");
        }
        let longest = VsockConfig { socket: "x".repeat(107).into(), ..vsock("cid=3,socket=/s") };
        assert_eq!(longest.check(&MemoryConfig::default()), Ok(()));
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! File systems of the host that another process serves (virtio-fs by vhost-user).

use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::vhost_user::{check_memory, check_queue_size, check_socket};
use super::{Add, Kind, KindConfig, Number, PartConfig, usual_methods};
use crate::body;
use crate::config::MemoryConfig;
use crate::error::ConfigError;
use crate::field::Field;
use crate::option_list::OptionList;

/// Bytes of a tag, as virtio has it.
const TAG_BYTES: usize = 36;
/// Most queues for requests.
const MAX_QUEUES: u16 = 63;

/// A file system of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FsConfig {
    /// The name by which the guest mounts it, 1 to 36 bytes.
    pub tag: String,
    /// Socket that the server listens on: virtiofsd, or another one of vhost-user. It is given all guest RAM, which must be shared.
    #[schema(value_type = String)]
    pub socket: PathBuf,
    /// Queues for requests, 1 to 63; there is one more, for urgent ones.
    #[serde(default = "default_queues")]
    #[schema(value_type = u64, minimum = 1, maximum = 63)]
    pub num_queues: u16,
    /// Size of each queue, a power of two from 4 to 1024.
    #[serde(default = "default_queue_size")]
    #[schema(value_type = u64, minimum = 4, maximum = 1024)]
    pub queue_size: u16,
    /// Must be off: servers of file systems take guest-physical addresses.
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

fn default_queues() -> u16 {
    1
}

fn default_queue_size() -> u16 {
    1024
}

impl FsConfig {
    /// The option.
    pub const OPTION: Field = Field::new("--fs", "fs");
    /// [`Self::tag`].
    pub const TAG: Field = Self::OPTION.key("tag");
    /// [`Self::socket`].
    pub const SOCKET: Field = Self::OPTION.key("socket");
    /// [`Self::num_queues`].
    pub const NUM_QUEUES: Field = Self::OPTION.key("num_queues");
    /// [`Self::queue_size`].
    pub const QUEUE_SIZE: Field = Self::OPTION.key("queue_size");
    /// [`Self::iommu`].
    pub const IOMMU: Field = Self::OPTION.key("iommu");

    /// The kind.
    pub const KIND: Kind = Kind {
        name: "fs",
        field: Self::OPTION,
        number: Number::Many,
        value: "tag=NAME,socket=FILE,…",
        help: "File system of the host, by a vhost-user server such as virtiofsd: tag=NAME,socket=FILE[,num_queues=1][,queue_size=1024][,pci_segment=N][,pci_device_id=N][,id=NAME]",
        bare: None,
        id: "_fs",
        takes_slot: true,
        passed_through: false,
        iommu: None,
        default_for_clients: false,
        add: Some(Add {
            operation: "vm.add-fs",
            id: "addFsVM",
            summary: "Adds a file system of the host that a vhost-user server serves, to a running VM too.",
            schema: "FsConfig",
            verb: "add-fs",
            about: "Add a file system of the host, to a running guest too: tag=NAME,socket=FILE[,num_queues=1][,queue_size=1024][,pci_segment=N][,pci_device_id=N][,id=NAME]",
        }),
        parse: |text| text.parse().map(PartConfig::Fs),
        read: |bytes| body::parse_device(bytes, Self::OPTION).map(PartConfig::Fs),
    };
}

impl KindConfig for FsConfig {
    usual_methods!(Fs);

    fn source(&self) -> Option<&Path> {
        Some(&self.socket)
    }

    /// A server has one client.
    fn exclusive(&self) -> Option<Field> {
        Some(Self::SOCKET)
    }

    fn check(&self, memory: &MemoryConfig) -> Result<(), ConfigError> {
        if self.iommu {
            let rule = "must be off, and the device on no segment of the virtio-iommu: servers of file systems (virtiofsd) take \
                        guest-physical addresses, and translate none";
            return Err(ConfigError::new(Self::IOMMU, rule));
        }
        if self.tag.is_empty() || self.tag.len() > TAG_BYTES || self.tag.contains('\0') {
            return Err(ConfigError::new(Self::TAG, format!("must have 1 to {TAG_BYTES} bytes, none of them zero")));
        }
        if !(1..=MAX_QUEUES).contains(&self.num_queues) {
            let rule = format!("{} is not 1 to {MAX_QUEUES}", self.num_queues);
            return Err(ConfigError::new(Self::NUM_QUEUES, rule));
        }
        check_queue_size(Self::QUEUE_SIZE, self.queue_size)?;
        check_socket(Self::SOCKET, &self.socket)?;
        check_memory(Self::SOCKET, memory)
    }
}

impl FromStr for FsConfig {
    type Err = ConfigError;

    /// Parses `tag=NAME,socket=PATH` with any of the other keys.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let keys = ["tag", "socket", "num_queues", "queue_size", "iommu", "pci_segment", "pci_device_id", "id"];
        let list = OptionList::parse(Self::OPTION, text, &keys)?;
        Ok(Self {
            tag: list.required("tag")?.into(),
            socket: list.required("socket")?.into(),
            num_queues: list.number("num_queues")?.unwrap_or_else(default_queues),
            queue_size: list.number("queue_size")?.unwrap_or_else(default_queue_size),
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

    fn fs(text: &str) -> FsConfig {
        text.parse().unwrap()
    }

    fn shared() -> MemoryConfig {
        MemoryConfig { shared: true, ..MemoryConfig::default() }
    }

    #[test]
    fn file_system_parses_as_cloud_hypervisor_spells_it() {
        let plain = fs("tag=t,socket=/s");
        assert_eq!(plain, serde_json::from_str(r#"{"tag": "t", "socket": "/s"}"#).unwrap());
        assert_eq!((plain.num_queues, plain.queue_size, plain.iommu), (1, 1024, false));
        let text = "tag=t,socket=/s,num_queues=2,queue_size=512,pci_segment=1,id=f";
        let json = r#"{"tag": "t", "socket": "/s", "num_queues": 2, "queue_size": 512, "pci_segment": 1, "id": "f"}"#;
        assert_eq!(fs(text), serde_json::from_str(json).unwrap());
    }

    #[test]
    fn malformed_file_systems_name_option_and_rule() {
        let refused = |text: &str| text.parse::<FsConfig>().unwrap_err().to_string();
        assert_eq!(refused("socket=/s"), "--fs: 'tag=' is needed");
        assert_eq!(refused("tag=t"), "--fs: 'socket=' is needed");
        assert_eq!(refused("tag=t,socket=/s,num_queues=x"), "--fs num_queues: is no number that fits");
        assert!(refused("tag=t,socket=/s,dax=on").starts_with("--fs: unknown key 'dax'"));
    }

    #[test]
    fn tag_queues_and_socket_are_checked() {
        let long = format!("socket=/{}", "x".repeat(107));
        for (text, field) in [
            ("tag=1234567890123456789012345678901234567,socket=/s", FsConfig::TAG),
            ("tag=t,socket=/s,num_queues=0", FsConfig::NUM_QUEUES),
            ("tag=t,socket=/s,num_queues=64", FsConfig::NUM_QUEUES),
            ("tag=t,socket=/s,queue_size=2", FsConfig::QUEUE_SIZE),
            ("tag=t,socket=/s,queue_size=100", FsConfig::QUEUE_SIZE),
            ("tag=t,socket=/s,queue_size=2048", FsConfig::QUEUE_SIZE),
            (&format!("tag=t,{long}"), FsConfig::SOCKET),
            ("tag=t,socket=/s,iommu=on", FsConfig::IOMMU),
        ] {
            let error = fs(text).check(&shared()).unwrap_err();
            assert_eq!(error.field, field, "{text}");
            assert!(error.explain(Terms::Json).starts_with("fs."), "{error}");
        }
        assert_eq!(fs("tag=123456789012345678901234567890123456,socket=/s").check(&shared()), Ok(()));
    }

    #[test]
    fn memory_must_be_shared_with_the_server() {
        let error = fs("tag=t,socket=/s").check(&MemoryConfig::default()).unwrap_err();
        let wanted = "--fs socket: the server is given all guest RAM, which needs --memory shared=on";
        assert_eq!(error.to_string(), wanted);
        assert!(error.explain(Terms::Json).ends_with("which needs memory.shared to be true"), "{error}");
    }
}

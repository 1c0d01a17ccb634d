// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Disks whose content is an image on the host.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Add, Kind, KindConfig, Number, PartConfig};
use crate::body;
use crate::config::MemoryConfig;
use crate::error::ConfigError;
use crate::field::Field;
use crate::option_list::OptionList;

/// Most queues of a disk: each has a thread.
const MAX_QUEUES: u16 = 64;
/// Least size of a queue: a request takes three descriptors.
const MIN_QUEUE_SIZE: u16 = 4;
/// Largest size of a queue: as many buffers as the host's kernel takes at once.
const MAX_QUEUE_SIZE: u16 = 1024;
/// Bytes of a serial number, as virtio has it.
const SERIAL_BYTES: usize = 20;

/// The form of an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum ImageType {
    /// Its bytes are those of the disk, whatever they look like.
    Raw,
    /// The same, but an image that looks like one of another form is refused. Nothing is guessed.
    #[default]
    Unknown,
}

/// How much of an image is locked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum LockGranularity {
    /// The bytes that it has.
    #[default]
    ByteRange,
    /// All bytes that it may ever have.
    Full,
}

/// A disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskConfig {
    /// The image: a file or a block device of the host.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// Whether the guest can only read it. Such an image may be that of several disks.
    #[serde(default)]
    pub readonly: bool,
    /// Whether the host's page cache is passed by (`O_DIRECT`).
    #[serde(default)]
    pub direct: bool,
    /// Whether the device is behind the virtio-iommu.
    #[serde(default)]
    pub iommu: bool,
    /// Queues, 1 to 64. Each has a thread.
    #[serde(default = "default_queues")]
    #[schema(value_type = u64, minimum = 1, maximum = 64)]
    pub num_queues: u16,
    /// Size of each queue, a power of two from 4 to 1024.
    #[serde(default = "default_queue_size")]
    #[schema(value_type = u64, minimum = 4, maximum = 1024)]
    pub queue_size: u16,
    /// What the guest is told as the serial number, 20 bytes at most. Otherwise it is the name.
    #[serde(default)]
    pub serial: Option<String>,
    /// Form of the image.
    #[serde(default)]
    pub image_type: ImageType,
    /// How much of the image is locked: for this VM alone, or beside other readers if it is read-only.
    #[serde(default)]
    pub lock_granularity: LockGranularity,
    /// PCI segment that the device is on.
    #[serde(default)]
    #[schema(maximum = 15)]
    pub pci_segment: u16,
    /// Name in logs and the API, as that of other devices.
    #[serde(default)]
    pub id: Option<String>,
}

fn default_queues() -> u16 {
    1
}

fn default_queue_size() -> u16 {
    128
}

impl DiskConfig {
    /// The option.
    pub const OPTION: Field = Field::new("--disk", "disks");
    /// [`Self::path`].
    pub const PATH: Field = Self::OPTION.key("path");
    /// [`Self::direct`].
    pub const DIRECT: Field = Self::OPTION.key("direct");
    /// [`Self::num_queues`].
    pub const NUM_QUEUES: Field = Self::OPTION.key("num_queues");
    /// [`Self::queue_size`].
    pub const QUEUE_SIZE: Field = Self::OPTION.key("queue_size");
    /// [`Self::serial`].
    pub const SERIAL: Field = Self::OPTION.key("serial");
    /// [`Self::image_type`].
    pub const IMAGE_TYPE: Field = Self::OPTION.key("image_type");

    /// The kind.
    pub const KIND: Kind = Kind {
        name: "block",
        field: Self::OPTION,
        number: Number::Many,
        value: "path=FILE,…",
        help: "Disk: path=FILE[,readonly=on|off][,direct=on|off][,iommu=on|off][,num_queues=1][,queue_size=128][,serial=TEXT][,image_type=raw][,pci_segment=N][,id=NAME]",
        bare: None,
        id: "_disk",
        takes_slot: true,
        passed_through: false,
        iommu: Some(Self::OPTION.key("iommu")),
        default_for_clients: false,
        add: Some(Add {
            operation: "vm.add-disk",
            id: "addDiskVM",
            summary: "Adds a disk, to a running VM too.",
            schema: "DiskConfig",
            verb: "add-disk",
            about: "Add a disk, to a running guest too: path=FILE[,readonly=on|off][,direct=on|off][,iommu=on|off][,…][,pci_segment=N][,id=NAME]",
        }),
        parse: |text| text.parse().map(PartConfig::Disk),
        read: |bytes| body::parse_device(bytes, Self::OPTION).map(PartConfig::Disk),
    };
}

impl KindConfig for DiskConfig {
    fn kind(&self) -> &'static Kind {
        &Self::KIND
    }

    fn id(&self) -> Option<&str> {
        self.id.as_deref()
    }

    fn set_id(&mut self, id: String) {
        self.id = Some(id);
    }

    fn put_behind_iommu(&mut self) {
        self.iommu = true;
    }

    fn pci_segment(&self) -> u16 {
        self.pci_segment
    }

    fn is_behind_iommu(&self) -> bool {
        self.iommu
    }

    fn source(&self) -> Option<&Path> {
        Some(&self.path)
    }

    /// Disks that are only read can share an image. One that is written and another that is read cannot either, which the lock on
    /// it says.
    fn exclusive(&self) -> Option<Field> {
        (!self.readonly).then_some(Self::PATH)
    }

    fn check(&self, _: &MemoryConfig) -> Result<(), ConfigError> {
        let Self { num_queues, queue_size, .. } = *self;
        let (field, rule) = if !(1..=MAX_QUEUES).contains(&num_queues) {
            (Self::NUM_QUEUES, format!("{num_queues} is not 1 to {MAX_QUEUES}"))
        } else if !queue_size.is_power_of_two() || !(MIN_QUEUE_SIZE..=MAX_QUEUE_SIZE).contains(&queue_size) {
            let rule = format!("{queue_size} is no power of two from {MIN_QUEUE_SIZE} to {MAX_QUEUE_SIZE}");
            (Self::QUEUE_SIZE, rule)
        } else if let Some(serial) = &self.serial
            && (serial.len() > SERIAL_BYTES || serial.contains('\0'))
        {
            (Self::SERIAL, format!("has more than {SERIAL_BYTES} bytes, or one that is zero"))
        } else {
            return Ok(());
        };
        Err(ConfigError::new(field, rule))
    }

    fn to_part(&self) -> PartConfig {
        PartConfig::Disk(self.clone())
    }
}

impl FromStr for DiskConfig {
    type Err = ConfigError;

    /// Parses `path=PATH` with any of the other keys.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let keys = [
            "path",
            "readonly",
            "direct",
            "iommu",
            "num_queues",
            "queue_size",
            "serial",
            "image_type",
            "lock_granularity",
            "pci_segment",
            "id",
        ];
        let list = OptionList::parse(Self::OPTION, text, &keys)?;
        let number = |key: &'static str, default: u16| match list.get(key).map(str::parse) {
            None => Ok(default),
            Some(Ok(number)) => Ok(number),
            Some(Err(_)) => Err(ConfigError::new(Self::OPTION.key(key), "is no number that fits")),
        };
        let image_type = match list.get("image_type") {
            None => ImageType::Unknown,
            Some("raw") => ImageType::Raw,
            Some(other) => {
                let rule = format!("'{other}' is not there yet: only 'raw' is");
                return Err(ConfigError::new(Self::IMAGE_TYPE, rule));
            }
        };
        let lock_granularity = match list.get("lock_granularity") {
            None | Some("byte-range") => LockGranularity::ByteRange,
            Some("full") => LockGranularity::Full,
            Some(other) => {
                let rule = format!("'{other}' is neither 'byte-range' nor 'full'");
                return Err(ConfigError::new(Self::OPTION.key("lock_granularity"), rule));
            }
        };
        Ok(Self {
            path: list.required("path")?.into(),
            readonly: list.toggle("readonly", false)?,
            direct: list.toggle("direct", false)?,
            iommu: list.toggle("iommu", false)?,
            pci_segment: list.segment()?,
            num_queues: number("num_queues", default_queues())?,
            queue_size: number("queue_size", default_queue_size())?,
            serial: list.get("serial").map(str::to_string),
            image_type,
            lock_granularity,
            id: list.get("id").map(str::to_string),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Explain;
    use crate::field::Terms;

    fn disk(text: &str) -> DiskConfig {
        text.parse().unwrap()
    }

    #[test]
    fn disk_parses_as_cloud_hypervisor_spells_it() {
        let plain = disk("path=/i.img");
        assert_eq!(plain, serde_json::from_str(r#"{"path": "/i.img"}"#).unwrap());
        assert_eq!(
            (plain.num_queues, plain.queue_size, plain.readonly, plain.image_type),
            (1, 128, false, ImageType::Unknown)
        );
        let text = "path=/i.img,readonly=on,direct=on,iommu=on,num_queues=4,queue_size=256,serial=x,image_type=raw,lock_granularity=full,pci_segment=0,id=d";
        let json = r#"{"path": "/i.img", "readonly": true, "direct": true, "iommu": true, "num_queues": 4, "queue_size": 256,
            "serial": "x", "image_type": "Raw", "lock_granularity": "Full", "id": "d"}"#;
        assert_eq!(disk(text), serde_json::from_str(json).unwrap());
    }

    #[test]
    fn malformed_disks_name_option_and_rule() {
        let refused = |text: &str| text.parse::<DiskConfig>().unwrap_err().to_string();
        assert_eq!(refused("readonly=on"), "--disk: 'path=' is needed");
        assert_eq!(refused("path=/x,direct=yes"), "--disk direct: 'yes' is neither 'on' nor 'off'");
        assert_eq!(refused("path=/x,num_queues=65536"), "--disk num_queues: is no number that fits");
        assert_eq!(refused("path=/x,image_type=qcow2"), "--disk image_type: 'qcow2' is not there yet: only 'raw' is");
        assert!(refused("path=/x,lock_granularity=no").starts_with("--disk lock_granularity: 'no' is neither"));
        assert_eq!(refused("path=/x,pci_segment=-1"), "--disk pci_segment: is no number that fits");
        assert!(refused("path=/x,bw_size=1").starts_with("--disk: unknown key 'bw_size'"));
    }

    #[test]
    fn queues_and_serial_number_are_checked() {
        let memory = MemoryConfig::default();
        for (text, field) in [
            ("num_queues=0", DiskConfig::NUM_QUEUES),
            ("num_queues=65", DiskConfig::NUM_QUEUES),
            ("queue_size=2", DiskConfig::QUEUE_SIZE),
            ("queue_size=100", DiskConfig::QUEUE_SIZE),
            ("queue_size=2048", DiskConfig::QUEUE_SIZE),
            ("serial=123456789012345678901", DiskConfig::SERIAL),
        ] {
            let error = disk(&format!("path=/x,{text}")).check(&memory).unwrap_err();
            assert_eq!(error.field, field, "{text}");
            assert!(error.explain(Terms::Json).starts_with("disks."), "{error}");
        }
        let most = disk("path=/x,num_queues=64,queue_size=1024,serial=12345678901234567890");
        assert_eq!(most.check(&memory), Ok(()));
    }

    #[test]
    fn image_belongs_to_one_disk_unless_it_is_read_only() {
        let conflict = |one: &str, other: &str| {
            let (one, other) = (disk(one), disk(other));
            let (one, other): (&dyn KindConfig, &dyn KindConfig) = (&one, &other);
            one.same_as(other).map(|(field, _)| field)
        };
        assert_eq!(conflict("path=/x", "path=/x"), Some(DiskConfig::PATH));
        assert_eq!(conflict("path=/x,readonly=on", "path=/x,readonly=on"), None);
        assert_eq!(conflict("path=/x", "path=/y"), None);
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Disks whose content is an image on the host.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::vhost_user::{self, check_memory, check_socket};
use super::{Add, HostFile, Kind, KindConfig, Number, PartConfig, usual_methods};
use crate::body;
use crate::config::{MemoryConfig, RATE_KEYS, RateLimiterConfig, VirtQueueAffinity};
use crate::error::ConfigError;
use crate::field::Field;
use crate::object;
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
    /// A qcow2 image.
    Qcow2,
    /// A VHD image of fixed size.
    FixedVhd,
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
    /// The image: a file or a block device of the host. There is none where another process serves the disk.
    #[serde(default, skip_serializing_if = "is_empty")]
    #[schema(value_type = Option<String>)]
    pub path: PathBuf,
    /// Whether a vhost-user server serves the disk. It is given all guest RAM, which must be shared.
    #[serde(default)]
    pub vhost_user: bool,
    /// Socket that the server listens on.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub vhost_socket: Option<PathBuf>,
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
    /// Whether the image may have others behind it, which are read too: files that it names.
    #[serde(default)]
    pub backing_files: bool,
    /// Whether the host's file system gets back what the guest discards. If not, a raw image that is written to has room for all of it from
    /// the start.
    #[serde(default = "default_sparse")]
    pub sparse: bool,
    /// How much of the image is locked: for this VM alone, or beside other readers if it is read-only.
    #[serde(default)]
    pub lock_granularity: LockGranularity,
    /// Limit on its rate, which all of its queues share.
    #[serde(default, deserialize_with = "object::or_null")]
    pub rate_limiter_config: Option<RateLimiterConfig>,
    /// The group (`rate_limit_groups`) whose limit it shares instead.
    #[serde(default)]
    pub rate_limit_group: Option<String>,
    /// The CPUs of the host that the threads of its queues run on; any where nothing is said of a queue.
    #[serde(default, deserialize_with = "object::list_or_null")]
    #[schema(value_type = Option<Vec<VirtQueueAffinity>>)]
    pub queue_affinity: Vec<VirtQueueAffinity>,
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

fn default_sparse() -> bool {
    true
}

fn is_empty(path: &Path) -> bool {
    path.as_os_str().is_empty()
}

fn default_queue_size() -> u16 {
    128
}

impl DiskConfig {
    /// The option.
    pub const OPTION: Field = Field::new("--disk", "disks");
    /// [`Self::path`].
    pub const PATH: Field = Self::OPTION.key("path");
    /// [`Self::vhost_user`].
    pub const VHOST_USER: Field = Self::OPTION.key("vhost_user");
    /// [`Self::vhost_socket`].
    pub const VHOST_SOCKET: Field = Self::OPTION.keys("socket", "vhost_socket");
    /// [`Self::readonly`].
    pub const READONLY: Field = Self::OPTION.key("readonly");
    /// [`Self::iommu`].
    pub const IOMMU: Field = Self::OPTION.key("iommu");
    /// [`Self::direct`].
    pub const DIRECT: Field = Self::OPTION.key("direct");
    /// [`Self::num_queues`].
    pub const NUM_QUEUES: Field = Self::OPTION.key("num_queues");
    /// [`Self::queue_size`].
    pub const QUEUE_SIZE: Field = Self::OPTION.key("queue_size");
    /// [`Self::serial`].
    pub const SERIAL: Field = Self::OPTION.key("serial");
    /// [`Self::rate_limiter_config`].
    pub const RATE_LIMIT: Field = Self::OPTION.keys("", "rate_limiter_config");
    /// [`Self::rate_limit_group`].
    pub const RATE_LIMIT_GROUP: Field = Self::OPTION.key("rate_limit_group");
    /// [`Self::queue_affinity`].
    pub const QUEUE_AFFINITY: Field = Self::OPTION.key("queue_affinity");
    /// [`Self::sparse`].
    pub const SPARSE: Field = Self::OPTION.key("sparse");
    /// [`Self::backing_files`].
    pub const BACKING_FILES: Field = Self::OPTION.key("backing_files");
    /// [`Self::image_type`].
    pub const IMAGE_TYPE: Field = Self::OPTION.key("image_type");

    /// The kind.
    pub const KIND: Kind = Kind {
        name: "block",
        field: Self::OPTION,
        number: Number::Many,
        value: "path=FILE,…",
        help: "Disk: path=FILE[,readonly=on|off][,direct=on|off][,iommu=on|off][,num_queues=1][,queue_size=128][,serial=TEXT][,image_type=raw|qcow2|fixedvhd][,backing_files=on|off][,sparse=on|off][,bw_size=BYTES,bw_refill_time=MS][,bw_one_time_burst=BYTES][,ops_size=N,ops_refill_time=MS][,ops_one_time_burst=N][,rate_limit_group=NAME][,queue_affinity=[QUEUE@[CPU,CPU-CPU],…]][,pci_segment=N][,pci_device_id=N][,id=NAME]",
        bare: None,
        id: "_disk",
        takes_slot: true,
        passed_through: false,
        iommu: Some(Self::IOMMU),
        default_for_clients: false,
        add: Some(Add {
            operation: "vm.add-disk",
            id: "addDiskVM",
            summary: "Adds a disk, to a running VM too.",
            schema: "DiskConfig",
            verb: "add-disk",
            about: "Add a disk, to a running guest too: path=FILE[,readonly=on|off][,direct=on|off][,iommu=on|off][,…][,pci_segment=N][,pci_device_id=N][,id=NAME]",
        }),
        parse: |text| text.parse().map(PartConfig::Disk),
        read: |bytes| body::parse_device(bytes, Self::OPTION).map(PartConfig::Disk),
    };
}

impl DiskConfig {
    /// Checks whose matter it is what the disk holds.
    fn check_source(&self, memory: &MemoryConfig) -> Result<(), ConfigError> {
        let refused = |field: Field, rule: &str| Err(ConfigError::new(field, rule));
        match (&self.vhost_socket, self.vhost_user) {
            (Some(_), false) => return refused(Self::VHOST_SOCKET, "is for a disk with vhost_user on"),
            (None, true) => return refused(Self::VHOST_USER, "is on, which needs a vhost_socket"),
            (None, false) if is_empty(&self.path) => {
                return refused(Self::PATH, "is needed, or vhost_user with a vhost_socket");
            }
            (None, false) => return Ok(()),
            (Some(socket), true) => check_socket(Self::VHOST_SOCKET, socket)?,
        }
        let servers = "is the server's matter where vhost_user is on: leave it out";
        for (field, given) in [
            (Self::PATH, !is_empty(&self.path)),
            (Self::READONLY, self.readonly),
            (Self::DIRECT, self.direct),
            (Self::SERIAL, self.serial.is_some()),
            (Self::BACKING_FILES, self.backing_files),
            (Self::SPARSE, !self.sparse),
            (Self::RATE_LIMIT, self.rate_limiter_config.is_some()),
            (Self::RATE_LIMIT_GROUP, self.rate_limit_group.is_some()),
            (Self::QUEUE_AFFINITY, !self.queue_affinity.is_empty()),
        ] {
            if given {
                return refused(field, servers);
            }
        }
        check_memory(Self::VHOST_SOCKET, memory)
    }
}

impl KindConfig for DiskConfig {
    usual_methods!(Disk);

    fn source(&self) -> Option<&Path> {
        Some(self.vhost_socket.as_deref().unwrap_or(&self.path))
    }

    fn files(&self) -> Vec<HostFile<'_>> {
        let path = self.vhost_socket.as_deref().unwrap_or(&self.path);
        vec![if self.readonly { HostFile::Read(path) } else { HostFile::ReadWrite(path) }]
    }

    /// Disks that are only read can share an image. One that is written and another that is read cannot either, which the lock on
    /// it says.
    fn exclusive(&self) -> Option<Field> {
        let own = if self.vhost_user { Self::VHOST_SOCKET } else { Self::PATH };
        (!self.readonly).then_some(own)
    }

    fn check(&self, memory: &MemoryConfig) -> Result<(), ConfigError> {
        self.check_source(memory)?;
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
        } else if self.rate_limit_group.is_some() && self.rate_limiter_config.is_some() {
            (Self::RATE_LIMIT_GROUP, "is for a disk without a limit of its own".to_string())
        } else {
            VirtQueueAffinity::check_all(&self.queue_affinity, Self::QUEUE_AFFINITY, num_queues)?;
            return self.rate_limiter_config.map_or(Ok(()), |limit| limit.check(Self::OPTION));
        };
        Err(ConfigError::new(field, rule))
    }
}

impl FromStr for DiskConfig {
    type Err = ConfigError;

    /// Parses `path=PATH` with any of the other keys.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let keys = [
            "path",
            "vhost_user",
            "socket",
            "vhost_socket",
            "readonly",
            "direct",
            "iommu",
            "num_queues",
            "queue_size",
            "serial",
            "image_type",
            "backing_files",
            "sparse",
            "lock_granularity",
            "rate_limit_group",
            "queue_affinity",
            "pci_segment",
            "pci_device_id",
            "id",
        ];
        let list = OptionList::parse(Self::OPTION, text, &[&keys, &RATE_KEYS[..]].concat())?;
        let image_types = [
            ("raw", ImageType::Raw),
            ("qcow2", ImageType::Qcow2),
            ("vhd", ImageType::FixedVhd),
            ("fixedvhd", ImageType::FixedVhd),
        ];
        let granularities = [("byte-range", LockGranularity::ByteRange), ("full", LockGranularity::Full)];
        let vhost_user = list.toggle("vhost_user", false)?;
        Ok(Self {
            path: if vhost_user { list.get("path").unwrap_or_default() } else { list.required("path")? }.into(),
            vhost_user,
            vhost_socket: vhost_user::socket(&list, Self::VHOST_SOCKET)?,
            readonly: list.toggle("readonly", false)?,
            direct: list.toggle("direct", false)?,
            iommu: list.toggle("iommu", false)?,
            pci_segment: list.segment()?,
            pci_device_id: list.number("pci_device_id")?,
            num_queues: list.number("num_queues")?.unwrap_or_else(default_queues),
            queue_size: list.number("queue_size")?.unwrap_or_else(default_queue_size),
            serial: list.get("serial").map(str::to_string),
            image_type: list.choice("image_type", &image_types)?.unwrap_or_default(),
            backing_files: list.toggle("backing_files", false)?,
            sparse: list.toggle("sparse", true)?,
            lock_granularity: list.choice("lock_granularity", &granularities)?.unwrap_or_default(),
            rate_limiter_config: RateLimiterConfig::parse(&list, Self::OPTION)?,
            rate_limit_group: list.get("rate_limit_group").map(str::to_string),
            queue_affinity: VirtQueueAffinity::parse(&list, Self::QUEUE_AFFINITY)?,
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
        let text = "path=/i.img,readonly=on,direct=on,iommu=on,num_queues=4,queue_size=256,serial=x,image_type=qcow2,backing_files=on,sparse=off,lock_granularity=full,bw_size=1,bw_refill_time=2,queue_affinity=[0@[1],3@[5-7]],pci_segment=0,id=d";
        let json = r#"{"path": "/i.img", "readonly": true, "direct": true, "iommu": true, "num_queues": 4, "queue_size": 256,
            "serial": "x", "image_type": "Qcow2", "backing_files": true, "sparse": false, "lock_granularity": "Full",
            "rate_limiter_config": {"bandwidth": {"size": 1, "refill_time": 2}}, "id": "d",
            "queue_affinity": [{"queue_index": 0, "host_cpus": [1]}, {"queue_index": 3, "host_cpus": [5, 6, 7]}]}"#;
        assert_eq!(disk(text), serde_json::from_str(json).unwrap());
        assert_eq!(disk("path=/i.img,image_type=VHD").image_type, ImageType::FixedVhd);
        assert_eq!(disk("path=/i.img,id=,serial=,readonly=,num_queues="), plain);
        let served = disk("vhost_user=on,socket=/s");
        assert_eq!(served, disk("vhost_user=TRUE,vhost_socket=/s"));
        assert_eq!(served, serde_json::from_str(r#"{"vhost_user": true, "vhost_socket": "/s"}"#).unwrap());
        let twice = "vhost_user=on,socket=/s,vhost_socket=/s".parse::<DiskConfig>().unwrap_err();
        assert_eq!(twice.to_string(), "--disk socket: is given twice, as vhost_socket too");
    }

    #[test]
    fn malformed_disks_name_option_and_rule() {
        let refused = |text: &str| text.parse::<DiskConfig>().unwrap_err().to_string();
        assert_eq!(refused("readonly=on"), "--disk: 'path=' is needed");
        assert_eq!(refused("path=/x,direct=yes"), "--disk direct: 'yes' is neither 'on' nor 'off'");
        assert_eq!(refused("path=/x,num_queues=65536"), "--disk num_queues: is no number that fits");
        assert_eq!(
            refused("path=/x,image_type=vhdx"),
            "--disk image_type: 'vhdx' is none of 'raw', 'qcow2', 'vhd' and 'fixedvhd'"
        );
        assert!(refused("path=/x,lock_granularity=no").starts_with("--disk lock_granularity: 'no' is neither"));
        assert_eq!(refused("path=/x,pci_segment=-1"), "--disk pci_segment: is no number that fits");
        assert_eq!(refused("path=/x,bw_size=1"), "--disk bw_refill_time: is needed for a limit on the rate");
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
            ("rate_limit_group=g,ops_size=1,ops_refill_time=1", DiskConfig::RATE_LIMIT_GROUP),
            ("queue_affinity=[1@[0]]", DiskConfig::QUEUE_AFFINITY),
            ("num_queues=2,queue_affinity=[1@[0],1@[0]]", DiskConfig::QUEUE_AFFINITY),
        ] {
            let error = disk(&format!("path=/x,{text}")).check(&memory).unwrap_err();
            assert_eq!(error.field, field, "{text}");
            assert!(error.explain(Terms::Json).starts_with("disks."), "{error}");
        }
        let most = disk("path=/x,num_queues=64,queue_size=1024,serial=12345678901234567890");
        assert_eq!(most.check(&memory), Ok(()));
    }

    #[test]
    fn disk_of_a_server_parses_as_cloud_hypervisor_spells_it() {
        let on = disk("vhost_user=on,vhost_socket=/s,num_queues=2");
        assert_eq!(disk("vhost_user=true,vhost_socket=/s,num_queues=2"), on);
        let json = r#"{"vhost_user": true, "vhost_socket": "/s", "num_queues": 2}"#;
        assert_eq!(on, serde_json::from_str(json).unwrap());
        assert!(!serde_json::to_string(&on).unwrap().contains(r#""path""#));
        let shared = MemoryConfig { shared: true, ..MemoryConfig::default() };
        assert_eq!(on.check(&shared), Ok(()));
        assert_eq!(disk("vhost_user=on,vhost_socket=/s,iommu=on").check(&shared), Ok(()));
        assert_eq!(on.check(&MemoryConfig::default()).unwrap_err().field, DiskConfig::VHOST_SOCKET);
        for (text, field) in [
            ("vhost_user=on", DiskConfig::VHOST_USER),
            ("path=/x,vhost_socket=/s", DiskConfig::VHOST_SOCKET),
            ("vhost_user=on,vhost_socket=/s,path=/x", DiskConfig::PATH),
            ("vhost_user=on,vhost_socket=/s,readonly=on", DiskConfig::READONLY),
            ("vhost_user=on,vhost_socket=/s,direct=on", DiskConfig::DIRECT),
            ("vhost_user=on,vhost_socket=/s,serial=x", DiskConfig::SERIAL),
            ("vhost_user=on,vhost_socket=/s,backing_files=on", DiskConfig::BACKING_FILES),
            ("vhost_user=on,vhost_socket=/s,sparse=off", DiskConfig::SPARSE),
            ("vhost_user=on,vhost_socket=/s,ops_size=1,ops_refill_time=1", DiskConfig::RATE_LIMIT),
            ("vhost_user=on,vhost_socket=/s,rate_limit_group=g", DiskConfig::RATE_LIMIT_GROUP),
            ("vhost_user=on,vhost_socket=/s,queue_affinity=[0@[0]]", DiskConfig::QUEUE_AFFINITY),
            ("vhost_user=on,vhost_socket=/s,num_queues=65", DiskConfig::NUM_QUEUES),
        ] {
            assert_eq!(disk(text).check(&shared).unwrap_err().field, field, "{text}");
        }
        let none: DiskConfig = serde_json::from_str("{}").unwrap();
        assert_eq!(none.check(&shared).unwrap_err().field, DiskConfig::PATH);
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

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Disks backed by an image on the host, or served by a vhost-user server.

use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::vhost_user::{self, check_memory, check_queue_size, check_queues, check_socket};
use super::{Add, HostFile, Kind, KindConfig, Number, device_config, usual_methods};
use crate::config::{MemoryConfig, RateLimiterConfig, VirtQueueAffinity};
use crate::error::{ConfigError, ensure, ensure_none};
use crate::field::{Field, keys};
use crate::left_out::{number, yes};
use crate::object;
use crate::option_list::{FromOption, OptionList, Special, from_str};

/// Maximum queues of a disk. Each queue has a thread.
const MAX_QUEUES: u16 = 64;
/// Valid queue sizes. A request needs at least three descriptors, and the host kernel accepts at most 1024 buffers at once.
const QUEUE_SIZES: RangeInclusive<u16> = 4..=1024;
/// Maximum bytes of a serial number, as defined by virtio.
const SERIAL_BYTES: usize = 20;

/// Format of an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum ImageType {
    /// The image holds the bytes of the disk. Its content is not checked for other formats.
    Raw,
    /// The image is raw, but is rejected if its content looks like another format. The VMM never guesses a format.
    #[default]
    Unknown,
    /// A qcow2 image.
    Qcow2,
    /// A VHD image of fixed size.
    FixedVhd,
}

/// Range of the image that the VMM locks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum LockGranularity {
    /// The current length of the image.
    #[default]
    ByteRange,
    /// All possible byte offsets.
    Full,
}

device_config! {
    /// A disk.
    pub struct DiskConfig {
        /// Image: a file or block device of the host. Leave out if a vhost-user server serves the disk.
        #[serde(default, skip_serializing_if = "is_empty")]
        #[schema(value_type = Option<String>)]
        pub path: PathBuf,
        /// True if a vhost-user server serves the disk. The server gets access to all guest RAM, which must be shared.
        #[serde(default)]
        pub vhost_user: bool,
        /// Socket on which the vhost-user server listens. Required with `vhost_user`.
        #[schema(value_type = Option<String>)]
        pub vhost_socket: Option<PathBuf>,
        /// True if the guest can only read the disk. Several read-only disks can use the same image.
        #[serde(default)]
        pub readonly: bool,
        /// True if the disk bypasses the host's page cache (`O_DIRECT`).
        #[serde(default)]
        pub direct: bool,
        /// True if the device is behind the virtio-iommu.
        #[serde(default)]
        pub iommu: bool,
        /// Number of queues, 1 to 64. Each queue has a thread.
        #[serde(default = "number::<1, _>")]
        #[schema(value_type = u64, minimum = 1, maximum = 64)]
        pub num_queues: u16,
        /// Size of each queue, a power of two from 4 to 1024.
        #[serde(default = "number::<128, _>")]
        #[schema(value_type = u64, minimum = 4, maximum = 1024)]
        pub queue_size: u16,
        /// Serial number that the guest sees, at most 20 bytes. The default is the device's ID.
        pub serial: Option<String>,
        /// Format of the image. By default (`Unknown`), the image is raw, but is rejected if its content looks like another format.
        #[serde(default)]
        pub image_type: ImageType,
        /// True if a qcow2 image may have a backing file, which is read too. An image can name any file of the host as its backing file, so
        /// allow this only for a trusted image.
        #[serde(default)]
        pub backing_files: bool,
        /// True if discards of the guest free space in the host's file system. If false, all space of a writable raw image is
        /// allocated when the disk is opened.
        #[serde(default = "yes")]
        pub sparse: bool,
        /// Range of the image that is locked: its current length (`ByteRange`), or all byte offsets (`Full`). The lock is shared for
        /// a read-only disk, and exclusive for other disks.
        #[serde(default)]
        pub lock_granularity: LockGranularity,
        /// Rate limit for all queues of the disk together.
        #[serde(default, deserialize_with = "object::or_null")]
        pub rate_limiter_config: Option<RateLimiterConfig>,
        /// ID of the rate limit group (`rate_limit_groups`) that the disk belongs to. Cannot be combined with
        /// `rate_limiter_config`.
        pub rate_limit_group: Option<String>,
        /// Host CPUs that the thread of each queue may run on. A queue without an entry may run on any CPU.
        #[serde(default, deserialize_with = "object::list_or_null")]
        pub queue_affinity: Vec<VirtQueueAffinity>,
    }
}

fn is_empty(path: &Path) -> bool {
    path.as_os_str().is_empty()
}

impl DiskConfig {
    /// Option and JSON field of this configuration.
    pub const OPTION: Field = Field::new("--disk", "disks");
    keys! {
        PATH = "path", VHOST_USER = "vhost_user", READONLY = "readonly", IOMMU = "iommu", DIRECT = "direct",
        NUM_QUEUES = "num_queues", QUEUE_SIZE = "queue_size", SERIAL = "serial",
        RATE_LIMIT_GROUP = "rate_limit_group", QUEUE_AFFINITY = "queue_affinity", SPARSE = "sparse",
        BACKING_FILES = "backing_files", IMAGE_TYPE = "image_type",
    }

    /// [`Self::vhost_socket`].
    pub const VHOST_SOCKET: Field = Self::OPTION.keys("socket", "vhost_socket");
    /// [`Self::rate_limiter_config`].
    pub const RATE_LIMIT: Field = Self::OPTION.keys("", "rate_limiter_config");
    /// Registry entry of this kind of device.
    pub const KIND: Kind = Kind {
        value: "path=FILE,…",
        help: "Disk",
        keys: "path=FILE[,readonly=on|off][,direct=on|off][,iommu=on|off][,num_queues=1][,queue_size=128][,serial=TEXT][,image_type=raw|qcow2|fixedvhd][,backing_files=on|off][,sparse=on|off][,bw_size=BYTES,bw_refill_time=MS][,bw_one_time_burst=BYTES][,ops_size=N,ops_refill_time=MS][,ops_one_time_burst=N][,rate_limit_group=NAME][,queue_affinity=[QUEUE@[CPU,CPU-CPU],…]]",
        few_keys: Some("path=FILE[,readonly=on|off][,direct=on|off][,iommu=on|off][,…]"),
        add: Some(Add {
            operation: "vm.add-disk",
            id: "addDiskVM",
            summary: "Adds a disk, also to a running VM.",
            schema: "DiskConfig",
            about: "Add a disk, also to a running guest",
        }),
        ..Kind::of::<Self>("block", "_disk", Number::Many)
    };
}

impl DiskConfig {
    /// Checks that exactly one source is configured: an image, or a vhost-user server.
    fn check_source(&self, memory: &MemoryConfig) -> Result<(), ConfigError> {
        let refused = |field: Field, rule: &str| Err(ConfigError::new(field, rule));
        match (&self.vhost_socket, self.vhost_user) {
            (Some(_), false) => return refused(Self::VHOST_SOCKET, "is only valid with vhost_user on"),
            (None, true) => return refused(Self::VHOST_USER, "is on, so vhost_socket is required"),
            (None, false) if is_empty(&self.path) => {
                return refused(
                    Self::PATH,
                    "is required: give the path of an image, or use a vhost-user server (vhost_user and vhost_socket)",
                );
            }
            (None, false) => return Ok(()),
            (Some(socket), true) => check_socket(Self::VHOST_SOCKET, socket)?,
        }
        let of_disk = [
            (Self::PATH, !is_empty(&self.path)),
            (Self::READONLY, self.readonly),
            (Self::DIRECT, self.direct),
            (Self::SERIAL, self.serial.is_some()),
            (Self::BACKING_FILES, self.backing_files),
            (Self::SPARSE, !self.sparse),
            (Self::RATE_LIMIT, self.rate_limiter_config.is_some()),
            (Self::RATE_LIMIT_GROUP, self.rate_limit_group.is_some()),
            (Self::QUEUE_AFFINITY, !self.queue_affinity.is_empty()),
        ];
        ensure_none(
            &of_disk,
            "cannot be combined with vhost_user: the vhost-user server controls this setting, so leave the setting out",
        )?;
        check_memory(Self::VHOST_SOCKET, memory)
    }
}

impl KindConfig for DiskConfig {
    usual_methods!();

    fn source(&self) -> Option<&Path> {
        Some(self.vhost_socket.as_deref().unwrap_or(&self.path))
    }

    fn files(&self) -> Vec<HostFile<'_>> {
        let path = self.vhost_socket.as_deref().unwrap_or(&self.path);
        vec![if self.readonly { HostFile::Read(path) } else { HostFile::ReadWrite(path) }]
    }

    /// Two writable disks cannot share an image. A writable disk and a read-only disk pass this check, but the lock on the image
    /// rejects them later.
    fn exclusive(&self) -> Option<Field> {
        let own = if self.vhost_user { Self::VHOST_SOCKET } else { Self::PATH };
        (!self.readonly).then_some(own)
    }

    fn check(&self, memory: &MemoryConfig) -> Result<(), ConfigError> {
        self.check_source(memory)?;
        check_queues(Self::NUM_QUEUES, self.num_queues, MAX_QUEUES)?;
        check_queue_size(Self::QUEUE_SIZE, self.queue_size, QUEUE_SIZES)?;
        let serial = self.serial.as_deref().unwrap_or_default();
        let fits = serial.len() <= SERIAL_BYTES && !serial.contains('\0');
        ensure(fits, Self::SERIAL, || format!("must have at most {SERIAL_BYTES} bytes and contain no NUL byte"))?;
        let has_one_limit = self.rate_limit_group.is_none() || self.rate_limiter_config.is_none();
        ensure(
            has_one_limit,
            Self::RATE_LIMIT_GROUP,
            || "cannot be combined with a rate limit for this disk alone: leave one of the two limits out",
        )?;
        VirtQueueAffinity::check_all(&self.queue_affinity, Self::QUEUE_AFFINITY, self.num_queues)?;
        self.rate_limiter_config.map_or(Ok(()), |limit| limit.check(Self::OPTION))
    }
}

impl FromOption for DiskConfig {
    const OPTION: Field = Self::OPTION;
    const SPECIAL: &'static [Special] = &[
        vhost_user::SOCKET_KEYS,
        RateLimiterConfig::KEYS,
        Special::Words(
            "image_type",
            &[("raw", "Raw"), ("qcow2", "Qcow2"), ("vhd", "FixedVhd"), ("fixedvhd", "FixedVhd")],
        ),
        Special::Words("lock_granularity", &[("byte-range", "ByteRange"), ("full", "Full")]),
    ];

    fn finish(&mut self, list: &OptionList) -> Result<(), ConfigError> {
        if !self.vhost_user {
            list.required("path")?;
        }
        self.vhost_socket = vhost_user::socket(list, Self::VHOST_SOCKET)?;
        self.rate_limiter_config = RateLimiterConfig::parse(list, Self::OPTION)?;
        Ok(())
    }
}
from_str!(DiskConfig);

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(text: &str) -> DiskConfig {
        text.parse().unwrap()
    }

    #[test]
    fn vhost_user_disk_has_no_path_and_needs_shared_memory() {
        let served = disk("vhost_user=on,vhost_socket=/s,num_queues=2");
        assert!(!serde_json::to_string(&served).unwrap().contains(r#""path""#));
        let memory = MemoryConfig::default();
        assert_eq!(served.check(&memory).unwrap_err().field, DiskConfig::VHOST_SOCKET);
        let none: DiskConfig = serde_json::from_str("{}").unwrap();
        assert_eq!(none.check(&memory).unwrap_err().field, DiskConfig::PATH);
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

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! File systems of the host that a vhost-user server shares (virtio-fs).

use std::path::{Path, PathBuf};

use super::vhost_user::{QUEUE_SIZES, check_memory, check_queue_size, check_queues, check_socket};
use super::{Add, Kind, KindConfig, Number, device_config, usual_methods};
use crate::config::MemoryConfig;
use crate::error::{ConfigError, ensure};
use crate::field::{Field, keys};
use crate::left_out::number;
use crate::option_list::from_option;

/// Maximum bytes of a tag, as defined by virtio.
const TAG_BYTES: usize = 36;
/// Maximum request queues.
const MAX_QUEUES: u16 = 63;

device_config! {
    /// File system of the host, shared with the guest (virtio-fs).
    pub struct FsConfig {
        /// Name in the guest's mount command, 1 to 36 bytes.
        pub tag: String,
        /// Socket on which the vhost-user server (such as virtiofsd) listens. The server gets access to all guest RAM, which must
        /// be shared.
        #[schema(value_type = String)]
        pub socket: PathBuf,
        /// Number of request queues, 1 to 63. The device has one more queue, for high-priority requests.
        #[serde(default = "number::<1, _>")]
        #[schema(value_type = u64, minimum = 1, maximum = 63)]
        pub num_queues: u16,
        /// Size of each queue, a power of two from 4 to 1024.
        #[serde(default = "number::<1024, _>")]
        #[schema(value_type = u64, minimum = 4, maximum = 1024)]
        pub queue_size: u16,
        /// Must be false: file system servers use guest-physical addresses.
        #[serde(default)]
        pub iommu: bool,
    }
}

impl FsConfig {
    /// Option and JSON field of this configuration.
    pub const OPTION: Field = Field::new("--fs", "fs");
    keys! { TAG = "tag", SOCKET = "socket", NUM_QUEUES = "num_queues", QUEUE_SIZE = "queue_size", IOMMU = "iommu" }

    /// Registry entry of this kind of device.
    pub const KIND: Kind = Kind {
        value: "tag=NAME,socket=FILE,…",
        help: "File system of the host, shared by a vhost-user server such as virtiofsd",
        keys: "tag=NAME,socket=FILE[,num_queues=1][,queue_size=1024]",
        iommu: None,
        add: Some(Add {
            operation: "vm.add-fs",
            id: "addFsVM",
            summary: "Adds a file system of the host that a vhost-user server shares, also to a running VM.",
            schema: "FsConfig",
            about: "Add a file system of the host, also to a running guest",
        }),
        ..Kind::of::<Self>("fs", "_fs", Number::Many)
    };
}

impl KindConfig for FsConfig {
    usual_methods!();

    fn source(&self) -> Option<&Path> {
        Some(&self.socket)
    }

    /// A server accepts only one client, so two devices cannot share a server.
    fn exclusive(&self) -> Option<Field> {
        Some(Self::SOCKET)
    }

    fn check(&self, memory: &MemoryConfig) -> Result<(), ConfigError> {
        ensure(!self.iommu, Self::IOMMU, || {
            "must be off, and the device must not be on a segment that iommu_segments lists: file system servers (virtiofsd) use \
             guest-physical addresses"
        })?;
        let tag_fits = (1..=TAG_BYTES).contains(&self.tag.len()) && !self.tag.contains('\0');
        ensure(tag_fits, Self::TAG, || format!("must have 1 to {TAG_BYTES} bytes and contain no NUL byte"))?;
        check_queues(Self::NUM_QUEUES, self.num_queues, MAX_QUEUES)?;
        check_queue_size(Self::QUEUE_SIZE, self.queue_size, QUEUE_SIZES)?;
        check_socket(Self::SOCKET, &self.socket)?;
        check_memory(Self::SOCKET, memory)
    }
}

from_option!(FsConfig);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Explain;
    use crate::field::Terms;

    fn fs(text: &str) -> FsConfig {
        text.parse().unwrap()
    }

    #[test]
    fn memory_must_be_shared_with_the_server() {
        let error = fs("tag=t,socket=/s").check(&MemoryConfig::default()).unwrap_err();
        let wanted =
            "--fs socket: the server must be able to map all guest RAM, so the device needs --memory shared=on";
        assert_eq!(error.to_string(), wanted);
        assert!(error.explain(Terms::Json).ends_with("so the device needs memory.shared to be true"), "{error}");
    }
}

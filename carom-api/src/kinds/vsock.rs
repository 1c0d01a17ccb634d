// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The virtio-vsock device: sockets between guest and host.

use std::path::{Path, PathBuf};

use super::vhost_user::check_socket;
use super::{Add, HostFile, Kind, KindConfig, Number, device_config, usual_methods};
use crate::config::MemoryConfig;
use crate::error::{ConfigError, ensure};
use crate::field::{Field, keys};
use crate::option_list::{FromOption, Special, from_str};

/// CIDs that a guest may have. Lower numbers stand for the hypervisor, local communication and the host, and the highest number
/// stands for any CID.
const CIDS: std::ops::RangeInclusive<u64> = 3..=u32::MAX as u64 - 1;

device_config! {
    /// Sockets between guest and host (virtio-vsock).
    pub struct VsockConfig {
        /// Context ID of the guest, 3 to 4294967294.
        #[schema(minimum = 3, maximum = 4294967294_u64)]
        pub cid: u64,
        /// Socket for host programs that connect to the guest. Carom creates the socket, and replaces a socket that a previous VM left
        /// behind. If the guest connects to port N of the host, Carom connects to the socket whose path is this path followed by `_N`.
        #[schema(value_type = String)]
        pub socket: PathBuf,
        /// True if the device is behind the virtio-iommu.
        #[serde(default)]
        pub iommu: bool,
    }
}

impl VsockConfig {
    /// Option and JSON field of this configuration.
    pub const OPTION: Field = Field::new("--vsock", "vsock");
    keys! { CID = "cid", SOCKET = "socket" }

    /// Registry entry of this kind of device.
    pub const KIND: Kind = Kind {
        value: "cid=N,socket=FILE,…",
        help: "Sockets between guest and host",
        keys: "cid=N,socket=FILE[,iommu=on|off]",
        add: Some(Add {
            operation: "vm.add-vsock",
            id: "addVsockVM",
            summary: "Adds sockets between guest and host, also to a running VM. A VM has at most one such device.",
            schema: "VsockConfig",
            about: "Add sockets between guest and host, also to a running guest",
        }),
        ..Kind::of::<Self>("vsock", "_vsock", Number::One)
    };
}

impl KindConfig for VsockConfig {
    usual_methods!();

    fn source(&self) -> Option<&Path> {
        Some(&self.socket)
    }

    fn files(&self) -> Vec<HostFile<'_>> {
        vec![HostFile::Socket(&self.socket)]
    }

    fn check(&self, _: &MemoryConfig) -> Result<(), ConfigError> {
        let cid = self.cid;
        ensure(CIDS.contains(&cid), Self::CID, || format!("{cid} is not between {} and {}", CIDS.start(), CIDS.end()))?;
        check_socket(Self::SOCKET, &self.socket)
    }
}

impl FromOption for VsockConfig {
    const OPTION: Field = Self::OPTION;
    const SPECIAL: &'static [Special] = &[Special::Number("cid")];
}
from_str!(VsockConfig);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Explain;
    use crate::field::Terms;

    fn vsock(text: &str) -> VsockConfig {
        text.parse().unwrap()
    }

    #[test]
    fn cid_out_of_range_and_invalid_path_are_refused() {
        let refused = |config: &VsockConfig| config.check(&MemoryConfig::default()).unwrap_err().explain(Terms::Json);
        for cid in [0, 1, 2, u64::from(u32::MAX), u64::MAX] {
            let config = VsockConfig { cid, ..vsock("cid=3,socket=/s") };
            assert_eq!(refused(&config), format!("vsock.cid: {cid} is not between 3 and 4294967294"));
        }
        for socket in [String::new(), "x".repeat(108), "a\0b".into()] {
            let config = VsockConfig { socket: socket.into(), ..vsock("cid=3,socket=/s") };
            assert_eq!(
                refused(&config),
                "vsock.socket: the path is invalid: use 1 to 107 bytes that contain no NUL byte"
            );
        }
        let longest = VsockConfig { socket: "x".repeat(107).into(), ..vsock("cid=3,socket=/s") };
        assert_eq!(longest.check(&MemoryConfig::default()), Ok(()));
    }
}

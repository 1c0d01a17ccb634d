// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Network devices backed by a tap interface of the host or by a vhost-user server.

use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::vhost_user::{self, check_memory, check_queue_size, check_socket};
use super::{Add, HostFile, Kind, KindConfig, Number, device_config, usual_methods};
use crate::config::{MemoryConfig, RateLimiterConfig};
use crate::error::{ConfigError, ensure, ensure_none, one_line};
use crate::field::{Field, keys};
use crate::left_out::{number, yes};
use crate::mac_address::MacAddress;
use crate::object;
use crate::option_list::{FromOption, OptionList, Special, from_str};
use crate::tap_files::TapFiles;

/// Maximum queues. Each pair of queues has a thread.
const MAX_QUEUES: u16 = 64;
/// Valid queue sizes. Without mergeable receive buffers, a received packet takes a descriptor for each of its pages, so a small queue could
/// not hold one packet.
const QUEUE_SIZES: RangeInclusive<u16> = 32..=1024;
/// Default prefix length of an IPv4 address.
const DEFAULT_PREFIX_V4: u32 = 24;
/// Default prefix length of an IPv6 address.
const DEFAULT_PREFIX_V6: u32 = 64;
/// Minimum MTU, as in Linux for IPv4 (`ETH_MIN_MTU`).
const MIN_MTU: u16 = 68;
/// Maximum bytes of an interface name (`IFNAMSIZ` without the zero byte).
const MAX_NAME: usize = 15;

/// Role of the VMM on the socket of a vhost-user device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum VhostMode {
    /// The server listens, and the VMM connects.
    #[default]
    Client,
    /// The VMM listens. Carom does not support this role.
    Server,
}

device_config! {
    /// A network device.
    pub struct NetConfig {
        /// Tap interface of the host, which is created if it does not exist. Without a name, the VMM creates a new interface such
        /// as `vmtap0`.
        pub tap: Option<String>,
        /// IPv4 or IPv6 address of the host on the interface. The VMM sets the address only if it creates the interface.
        #[schema(value_type = Option<String>)]
        pub ip: Option<IpAddr>,
        /// Network mask of `ip`, of the same address family. The default is 255.255.255.0 or ffff:ffff:ffff:ffff::.
        #[schema(value_type = Option<String>)]
        pub mask: Option<IpAddr>,
        /// MAC address of the guest's device. By default, a random address.
        #[schema(value_type = Option<String>)]
        pub mac: Option<MacAddress>,
        /// MAC address of the host's side of the interface. By default, the interface keeps its address.
        #[schema(value_type = Option<String>)]
        pub host_mac: Option<MacAddress>,
        /// MTU in bytes, which the VMM also sets on the interface. By default, the device has the MTU of the interface.
        #[schema(value_type = Option<u64>, minimum = 68, maximum = 65535)]
        pub mtu: Option<u16>,
        /// True if the device is behind the virtio-iommu.
        #[serde(default)]
        pub iommu: bool,
        /// Number of queues, an even number from 2 to 64. Half of the queues are receive queues. Each pair of queues has a thread.
        #[serde(default = "number::<2, _>")]
        #[schema(value_type = u64, minimum = 2, maximum = 64)]
        pub num_queues: u16,
        /// Size of each queue, a power of two from 32 to 1024.
        #[serde(default = "number::<256, _>")]
        #[schema(value_type = u64, minimum = 32, maximum = 1024)]
        pub queue_size: u16,
        /// True if TCP segmentation offload is on: guest and host exchange several TCP segments as one packet.
        #[serde(default = "yes")]
        pub offload_tso: bool,
        /// True if UDP segmentation offload is on. Has no effect if the host kernel does not support this offload.
        #[serde(default = "yes")]
        pub offload_ufo: bool,
        /// True if checksum offload is on: guest and host may leave checksums to the other side.
        #[serde(default = "yes")]
        pub offload_csum: bool,
        /// True if a vhost-user server moves the packets. The server gets access to all guest RAM, which must be shared.
        #[serde(default)]
        pub vhost_user: bool,
        /// Socket on which the vhost-user server listens. Required with `vhost_user`.
        #[schema(value_type = Option<String>)]
        pub vhost_socket: Option<PathBuf>,
        /// Role of the VMM on the socket. Must be Client: the server listens, and the VMM connects.
        #[serde(default)]
        pub vhost_mode: VhostMode,
        /// Rate limit, applied to each direction separately.
        #[serde(default, deserialize_with = "object::or_null")]
        pub rate_limiter_config: Option<RateLimiterConfig>,
        /// Descriptor numbers of the interface in the client's process. The VMM ignores the numbers. The client must pass the
        /// descriptors with the request (`SCM_RIGHTS`), one for each pair of queues.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub fds: Vec<i32>,
        /// Descriptors of the interface, passed with the request.
        #[serde(skip)]
        pub files: TapFiles,
        /// Inherited descriptors of the interface, from the command line, one for each pair of queues.
        #[serde(skip)]
        pub inherited: Vec<i32>,
    }
}

impl NetConfig {
    /// Option and JSON field of this configuration.
    pub const OPTION: Field = Field::new("--net", "net");
    keys! {
        TAP = "tap", IP = "ip", MASK = "mask", MAC = "mac", HOST_MAC = "host_mac", MTU = "mtu",
        NUM_QUEUES = "num_queues", QUEUE_SIZE = "queue_size", IOMMU = "iommu", VHOST_USER = "vhost_user",
        VHOST_MODE = "vhost_mode",
    }

    /// [`Self::vhost_socket`].
    pub const VHOST_SOCKET: Field = Self::OPTION.keys("socket", "vhost_socket");
    /// [`Self::rate_limiter_config`].
    pub const RATE_LIMIT: Field = Self::OPTION.keys("", "rate_limiter_config");
    /// Descriptors of the interface.
    pub const FD: Field = Self::OPTION.keys("fd", "fds");

    /// Registry entry of this kind of device.
    pub const KIND: Kind = Kind {
        value: "tap=NAME,…",
        help: "Network device",
        keys: "[tap=NAME|fd=N|fd=[N,N]][,ip=ADDRESS][,mask=MASK][,mac=ADDRESS][,host_mac=ADDRESS][,mtu=BYTES][,iommu=on|off][,num_queues=2][,queue_size=256][,offload_tso=on|off][,offload_ufo=on|off][,offload_csum=on|off][,vhost_user=on|off,socket=FILE][,vhost_mode=client][,bw_size=BYTES,bw_refill_time=MS][,bw_one_time_burst=BYTES][,ops_size=N,ops_refill_time=MS][,ops_one_time_burst=N]",
        few_keys: Some(
            "[tap=NAME][,ip=ADDRESS][,mask=MASK][,mac=ADDRESS][,iommu=on|off][,vhost_user=on,socket=FILE][,…]",
        ),
        add: Some(Add {
            operation: "vm.add-net",
            id: "addNetVM",
            summary: "Adds a network device, also to a running VM. The client can pass open descriptors of the tap interface, one for each pair of queues.",
            schema: "NetConfig",
            about: "Add a network device, also to a running guest",
        }),
        ..Kind::of::<Self>("net", "_net", Number::Many)
    };

    /// Returns the host's address on the interface, with its prefix length.
    pub fn address(&self) -> Option<(IpAddr, u32)> {
        let ip = self.ip?;
        let default = if ip.is_ipv6() { DEFAULT_PREFIX_V6 } else { DEFAULT_PREFIX_V4 };
        Some((ip, self.mask.and_then(prefix_length).unwrap_or(default)))
    }

    /// Returns the number of queue pairs. A pair is a receive queue and a transmit queue.
    pub fn pairs(&self) -> u16 {
        self.num_queues / 2
    }

    /// Stores the descriptors of a tap interface that a client passed for the device.
    ///
    /// # Errors
    /// The number of descriptors differs from the number of queue pairs, or a field is set that cannot be combined with descriptors.
    pub fn take_files(&mut self, files: Vec<OwnedFd>) -> Result<(), ConfigError> {
        self.give_files(TapFiles::new(files))
    }

    pub(crate) fn give_files(&mut self, files: TapFiles) -> Result<(), ConfigError> {
        self.check_descriptors(files.count())?;
        self.files = files;
        self.fds.clear();
        Ok(())
    }
}

impl NetConfig {
    /// Checks the fields of a device that gets `count` descriptors of an interface.
    fn check_descriptors(&self, count: usize) -> Result<(), ConfigError> {
        let pairs = self.pairs();
        ensure(
            !self.vhost_user,
            Self::VHOST_USER,
            || "cannot be combined with descriptors of an interface: turn vhost_user off",
        )?;
        let of_interface = [(Self::TAP, self.tap.is_some()), (Self::HOST_MAC, self.host_mac.is_some())];
        ensure_none(&of_interface, "cannot be combined with descriptors of an interface: leave this setting out")?;
        let is_whole = count == usize::from(pairs);
        ensure(is_whole, Self::FD, || {
            format!("{count} descriptors were passed instead of {pairs}: pass one for each pair of queues")
        })
    }

    fn check_mask(&self, mask: IpAddr) -> Result<(), ConfigError> {
        let Some(ip) = self.ip else { return Err(ConfigError::new(Self::MASK, "is only valid with ip")) };
        ensure(ip.is_ipv6() == mask.is_ipv6(), Self::MASK, || {
            let family = if ip.is_ipv6() { "IPv6" } else { "IPv4" };
            format!("{mask} has a different address family than ip: an {family} address needs an {family} mask")
        })?;
        let is_prefix = prefix_length(mask).is_some();
        ensure(is_prefix, Self::MASK, || "is not a network mask: its set bits must be contiguous from the left")
    }

    /// Checks that exactly one backend is configured: an interface, or a vhost-user server.
    fn check_server(&self, memory: &MemoryConfig) -> Result<(), ConfigError> {
        const ONLY_CLIENT: &str = "must be client mode: the server listens, and Carom connects to it";
        let refused = |field: Field, rule: &str| Err(ConfigError::new(field, rule));
        let socket = match (&self.vhost_socket, self.vhost_user) {
            (Some(_), false) => return refused(Self::VHOST_SOCKET, "is only valid with vhost_user on"),
            (None, true) => return refused(Self::VHOST_USER, "is on, so vhost_socket is required"),
            (None, false) if self.vhost_mode == VhostMode::Server => {
                return refused(Self::VHOST_MODE, ONLY_CLIENT);
            }
            (None, false) => return Ok(()),
            (Some(socket), true) => socket,
        };
        ensure(self.vhost_mode == VhostMode::Client, Self::VHOST_MODE, || ONLY_CLIENT)?;
        check_socket(Self::VHOST_SOCKET, socket)?;
        let of_interface = [
            (Self::TAP, self.tap.is_some()),
            (Self::IP, self.ip.is_some()),
            (Self::MASK, self.mask.is_some()),
            (Self::HOST_MAC, self.host_mac.is_some()),
            (Self::FD, !self.fds.is_empty()),
            (Self::RATE_LIMIT, self.rate_limiter_config.is_some()),
        ];
        let rule = "cannot be combined with vhost_user: the vhost-user server connects the guest to the network, so leave this setting out";
        ensure_none(&of_interface, rule)?;
        check_memory(Self::VHOST_SOCKET, memory)
    }
}

impl KindConfig for NetConfig {
    usual_methods!();

    fn source(&self) -> Option<&Path> {
        self.vhost_socket.as_deref().or(self.tap.as_deref().map(Path::new))
    }

    fn files(&self) -> Vec<HostFile<'_>> {
        if !self.inherited.is_empty() || !self.files.is_empty() {
            return Vec::new();
        }
        let interface = HostFile::Interface(self.tap.as_deref());
        vec![self.vhost_socket.as_deref().map_or(interface, HostFile::ReadWrite)]
    }

    fn inherited(&self) -> &[i32] {
        &self.inherited
    }

    /// Two devices cannot share an interface or a server.
    fn exclusive(&self) -> Option<Field> {
        let tap = self.tap.is_some().then_some(Self::TAP);
        if self.vhost_user { Some(Self::VHOST_SOCKET) } else { tap }
    }

    /// Generates a missing MAC address now, so that every boot of the VM uses the same address.
    fn complete(&mut self) {
        self.mac.get_or_insert_with(MacAddress::random);
    }

    fn check(&self, memory: &MemoryConfig) -> Result<(), ConfigError> {
        self.check_server(memory)?;
        if !self.inherited.is_empty() {
            self.check_descriptors(self.inherited.len())?;
        }
        let queues = self.num_queues;
        let fits = queues.is_multiple_of(2) && (2..=MAX_QUEUES).contains(&queues);
        ensure(fits, Self::NUM_QUEUES, || format!("{queues} is not an even number from 2 to {MAX_QUEUES}"))?;
        check_queue_size(Self::QUEUE_SIZE, self.queue_size, QUEUE_SIZES)?;
        let mtu = self.mtu.unwrap_or(MIN_MTU);
        ensure(mtu >= MIN_MTU, Self::MTU, || format!("{mtu} is below the minimum of {MIN_MTU}"))?;
        ensure(self.tap.as_deref().is_none_or(is_interface_name), Self::TAP, || {
            format!(
                "is not a valid interface name: use 1 to {MAX_NAME} ASCII letters, digits or punctuation marks except '/', ':' and '%'; the names '.' and '..' are not allowed"
            )
        })?;
        if let Some(mask) = self.mask {
            self.check_mask(mask)?;
        }
        ensure(
            self.fds.is_empty(),
            Self::FD,
            || "holds descriptor numbers of the client's process, which Carom cannot use: pass the descriptors with the request (SCM_RIGHTS), one for each pair of queues",
        )?;
        self.rate_limiter_config.map_or(Ok(()), |limit| limit.check(Self::OPTION))
    }
}

/// Returns the prefix length of a network mask. Returns `None` if the set bits are not contiguous.
fn prefix_length(mask: IpAddr) -> Option<u32> {
    let (ones, zeros, bits) = match mask {
        IpAddr::V4(mask) => (mask.to_bits().leading_ones(), mask.to_bits().trailing_zeros(), 32),
        IpAddr::V6(mask) => (mask.to_bits().leading_ones(), mask.to_bits().trailing_zeros(), 128),
    };
    (ones + zeros >= bits).then_some(ones)
}

/// True if Linux accepts the name (`dev_valid_name()`). A name with a percent sign is rejected, because Linux uses such a name as a
/// template for a generated name.
fn is_interface_name(name: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_graphic() && !matches!(byte, b'/' | b':' | b'%');
    (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(fits) && name != "." && name != ".."
}

impl FromOption for NetConfig {
    const OPTION: Field = Self::OPTION;
    const SPECIAL: &'static [Special] = &[
        Special::Rule("ip", no_address),
        Special::Rule("mask", no_address),
        vhost_user::SOCKET_KEYS,
        RateLimiterConfig::KEYS,
        Special::By("fds", &["fd"]),
    ];

    fn finish(&mut self, list: &OptionList) -> Result<(), ConfigError> {
        self.vhost_socket = vhost_user::socket(list, Self::VHOST_SOCKET)?;
        self.rate_limiter_config = RateLimiterConfig::parse(list, Self::OPTION)?;
        self.inherited = descriptors(list)?;
        if list.get("num_queues").is_none() && !self.inherited.is_empty() {
            // Each pair of queues has its own descriptor.
            self.num_queues = u16::try_from(self.inherited.len() * 2).unwrap_or(u16::MAX);
        }
        Ok(())
    }
}
from_str!(NetConfig);

fn no_address(_: &str) -> String {
    "is not an IP address, such as 192.168.249.1 or fd00::1".into()
}

/// Parses the numbers of `fd=N` or `fd=[N,N]`.
fn descriptors(list: &OptionList) -> Result<Vec<i32>, ConfigError> {
    let refused = |rule: String| Err(ConfigError::new(NetConfig::FD, rule));
    let Some(texts) = list.read::<Vec<String>>("fd")? else { return Ok(Vec::new()) };
    let mut numbers = Vec::new();
    for text in texts {
        match text.parse::<i32>() {
            Ok(number) if numbers.contains(&number) => {
                return refused(format!("{number} is given twice: every pair of queues needs its own descriptor"));
            }
            Ok(number) if number > 2 => numbers.push(number),
            _ => return refused(format!("'{}' is not a descriptor number above 2", one_line(&text))),
        }
    }
    if numbers.is_empty() { refused("must name at least one descriptor".into()) } else { Ok(numbers) }
}

#[cfg(test)]
mod tests;

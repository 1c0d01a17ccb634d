// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Network devices whose other side is a tap interface of the host, or a vhost-user server.

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

/// Most queues: each pair has a thread.
const MAX_QUEUES: u16 = 64;
/// Sizes of a queue: a packet without merged buffers takes as many descriptors as it has pages.
const QUEUE_SIZES: RangeInclusive<u16> = 32..=1024;
/// Bits of the network mask of an IPv4 address that has none.
const DEFAULT_PREFIX_V4: u32 = 24;
/// The same of an IPv6 address.
const DEFAULT_PREFIX_V6: u32 = 64;
/// Least MTU, as Linux has it for IPv4 (`ETH_MIN_MTU`).
const MIN_MTU: u16 = 68;
/// Most bytes of the name of an interface (`IFNAMSIZ` without the zero byte).
const MAX_NAME: usize = 15;

/// Which side listens at the socket of a vhost-user device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum VhostMode {
    /// The server does.
    #[default]
    Client,
    /// The VMM would: refused.
    Server,
}

device_config! {
    /// A network device.
    pub struct NetConfig {
        /// The tap interface of the host, which is made if it is not there; without a name, a new one: `vmtap0` and so on.
        pub tap: Option<String>,
        /// IPv4 or IPv6 address of the host on the interface, if that is made.
        #[schema(value_type = Option<String>)]
        pub ip: Option<IpAddr>,
        /// Network mask of that address, of the same family. The default is 255.255.255.0 or ffff:ffff:ffff:ffff::.
        #[schema(value_type = Option<String>)]
        pub mask: Option<IpAddr>,
        /// Address of the guest's device; one is made up where nothing is said.
        #[schema(value_type = Option<String>)]
        pub mac: Option<MacAddress>,
        /// Address of the host's side of the interface, if that is to be another than it has.
        #[schema(value_type = Option<String>)]
        pub host_mac: Option<MacAddress>,
        /// Most bytes of a packet without its Ethernet header, which the interface gets too; otherwise it is the interface's.
        #[schema(value_type = Option<u64>, minimum = 68, maximum = 65535)]
        pub mtu: Option<u16>,
        /// True if the device is behind the virtio-iommu.
        #[serde(default)]
        pub iommu: bool,
        /// Queues, an even number from 2 to 64: half of them receive. Each pair has a thread.
        #[serde(default = "number::<2, _>")]
        #[schema(value_type = u64, minimum = 2, maximum = 64)]
        pub num_queues: u16,
        /// Size of each queue, a power of two from 32 to 1024.
        #[serde(default = "number::<256, _>")]
        #[schema(value_type = u64, minimum = 32, maximum = 1024)]
        pub queue_size: u16,
        /// True if segments of TCP may come and go as one packet.
        #[serde(default = "yes")]
        pub offload_tso: bool,
        /// True if segments of UDP may, where the host's kernel can.
        #[serde(default = "yes")]
        pub offload_ufo: bool,
        /// True if checksums may be left to the other side.
        #[serde(default = "yes")]
        pub offload_csum: bool,
        /// True if a vhost-user server moves the packets. It is given all guest RAM, which must be shared.
        #[serde(default)]
        pub vhost_user: bool,
        /// Socket that the server listens on.
        #[schema(value_type = Option<String>)]
        pub vhost_socket: Option<PathBuf>,
        /// Which side listens: the server must.
        #[serde(default)]
        pub vhost_mode: VhostMode,
        /// Limit on its rate, of each direction for itself.
        #[serde(default, deserialize_with = "object::or_null")]
        pub rate_limiter_config: Option<RateLimiterConfig>,
        /// Numbers that the interface's descriptors have in the client's process, which mean nothing here: the descriptors come with the
        /// request itself (`SCM_RIGHTS`), one for each two queues. Taken where they do.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub fds: Vec<i32>,
        /// The interface's files that came with the request.
        #[serde(skip)]
        pub files: TapFiles,
        /// Numbers of descriptors of the interface that the program was started with, one for each two queues: those of the command line.
        #[serde(skip)]
        pub inherited: Vec<i32>,
    }
}

impl NetConfig {
    /// The option.
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

    /// The kind.
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
            summary: "Adds a network device, to a running VM too. Files of the tap interface may come as descriptors, one for each pair of queues.",
            schema: "NetConfig",
            about: "Add a network device, to a running guest too",
        }),
        ..Kind::of::<Self>("net", "_net", Number::Many)
    };

    /// The host's address on the interface, with the bits of its network mask that are set.
    pub fn address(&self) -> Option<(IpAddr, u32)> {
        let ip = self.ip?;
        let default = if ip.is_ipv6() { DEFAULT_PREFIX_V6 } else { DEFAULT_PREFIX_V4 };
        Some((ip, self.mask.and_then(prefix_length).unwrap_or(default)))
    }

    /// Pairs of queues, one to receive and one to transmit.
    pub fn pairs(&self) -> u16 {
        self.num_queues / 2
    }

    /// Gives the device an interface that a client has open.
    ///
    /// # Errors
    /// There is not a file for each pair of queues, or the interface is named too, or another process's.
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
    /// Checks what goes with `count` descriptors of an interface.
    fn check_descriptors(&self, count: usize) -> Result<(), ConfigError> {
        let pairs = self.pairs();
        ensure(!self.vhost_user, Self::VHOST_USER, || "is for a device without descriptors of an interface")?;
        let of_interface = [(Self::TAP, self.tap.is_some()), (Self::HOST_MAC, self.host_mac.is_some())];
        ensure_none(&of_interface, "is for an interface that the program opens, not for descriptors")?;
        let is_whole = count == usize::from(pairs);
        ensure(is_whole, Self::FD, || format!("{count} came, not {pairs}: one for each two queues"))
    }

    fn check_mask(&self, mask: IpAddr) -> Result<(), ConfigError> {
        let Some(ip) = self.ip else { return Err(ConfigError::new(Self::MASK, "is used with ip only")) };
        ensure(ip.is_ipv6() == mask.is_ipv6(), Self::MASK, || {
            let family = if ip.is_ipv6() { "IPv6" } else { "IPv4" };
            format!("{mask} is of another family than ip: an {family} address needs an {family} mask")
        })?;
        let is_prefix = prefix_length(mask).is_some();
        ensure(is_prefix, Self::MASK, || "has bits that are set behind others that are not")
    }

    /// Checks whose matter it is where packets go.
    fn check_server(&self, memory: &MemoryConfig) -> Result<(), ConfigError> {
        let refused = |field: Field, rule: &str| Err(ConfigError::new(field, rule));
        let socket = match (&self.vhost_socket, self.vhost_user) {
            (Some(_), false) => return refused(Self::VHOST_SOCKET, "is for a device with vhost_user on"),
            (None, true) => return refused(Self::VHOST_USER, "is on, which needs the server's socket"),
            (None, false) if self.vhost_mode == VhostMode::Server => {
                return refused(Self::VHOST_MODE, "is for a device with vhost_user on");
            }
            (None, false) => return Ok(()),
            (Some(socket), true) => socket,
        };
        ensure(
            self.vhost_mode == VhostMode::Client,
            Self::VHOST_MODE,
            || "must be that of a client: the server listens, and this program connects to it",
        )?;
        check_socket(Self::VHOST_SOCKET, socket)?;
        let of_interface = [
            (Self::TAP, self.tap.is_some()),
            (Self::IP, self.ip.is_some()),
            (Self::MASK, self.mask.is_some()),
            (Self::HOST_MAC, self.host_mac.is_some()),
            (Self::FD, !self.fds.is_empty()),
            (Self::RATE_LIMIT, self.rate_limiter_config.is_some()),
        ];
        let rule = "is for a tap interface; with vhost_user on, the server has its own: leave it out";
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

    /// An interface has one user, and a server one client.
    fn exclusive(&self) -> Option<Field> {
        let tap = self.tap.is_some().then_some(Self::TAP);
        if self.vhost_user { Some(Self::VHOST_SOCKET) } else { tap }
    }

    /// The address stays the same from one boot to the next.
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
        ensure(fits, Self::NUM_QUEUES, || format!("{queues} is no even number from 2 to {MAX_QUEUES}"))?;
        check_queue_size(Self::QUEUE_SIZE, self.queue_size, QUEUE_SIZES)?;
        let mtu = self.mtu.unwrap_or(MIN_MTU);
        ensure(mtu >= MIN_MTU, Self::MTU, || format!("{mtu} is less than {MIN_MTU}"))?;
        ensure(self.tap.as_deref().is_none_or(is_interface_name), Self::TAP, || {
            format!("is no name of an interface: 1 to {MAX_NAME} bytes without '/', ':', '%' and blanks")
        })?;
        if let Some(mask) = self.mask {
            self.check_mask(mask)?;
        }
        ensure(
            self.fds.is_empty(),
            Self::FD,
            || "are numbers of the client: descriptors come with the request itself (SCM_RIGHTS), one for each two queues",
        )?;
        self.rate_limiter_config.map_or(Ok(()), |limit| limit.check(Self::OPTION))
    }
}

/// Bits that are set in a network mask; `None` if a bit is set behind one that is not.
fn prefix_length(mask: IpAddr) -> Option<u32> {
    let (ones, zeros, bits) = match mask {
        IpAddr::V4(mask) => (mask.to_bits().leading_ones(), mask.to_bits().trailing_zeros(), 32),
        IpAddr::V6(mask) => (mask.to_bits().leading_ones(), mask.to_bits().trailing_zeros(), 128),
    };
    (ones + zeros >= bits).then_some(ones)
}

/// As Linux checks it (`dev_valid_name()`); a percent sign would have it make up a name.
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
            // As many as there are descriptors for.
            self.num_queues = u16::try_from(self.inherited.len() * 2).unwrap_or(u16::MAX);
        }
        Ok(())
    }
}
from_str!(NetConfig);

fn no_address(_: &str) -> String {
    "is no IP address, such as 192.168.249.1 or fd00::1".into()
}

/// The numbers of `fd=N` or `fd=[N,N]`.
fn descriptors(list: &OptionList) -> Result<Vec<i32>, ConfigError> {
    let refused = |rule: String| Err(ConfigError::new(NetConfig::FD, rule));
    let Some(texts) = list.read::<Vec<String>>("fd")? else { return Ok(Vec::new()) };
    let mut numbers = Vec::new();
    for text in texts {
        match text.parse::<i32>() {
            Ok(number) if numbers.contains(&number) => return refused(format!("{number} is given twice")),
            Ok(number) if number > 2 => numbers.push(number),
            _ => return refused(format!("'{}' is no descriptor above 2", one_line(&text))),
        }
    }
    if numbers.is_empty() { refused("names no descriptor".into()) } else { Ok(numbers) }
}

#[cfg(test)]
mod tests;

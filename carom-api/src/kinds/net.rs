// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Network devices whose other side is a tap interface of the host, or a vhost-user server.

use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::vhost_user::{self, check_memory, check_socket};
use super::{Add, HostFile, Kind, KindConfig, Number, PartConfig, usual_methods};
use crate::body;
use crate::config::{MemoryConfig, RATE_KEYS, RateLimiterConfig};
use crate::error::{ConfigError, one_line};
use crate::field::Field;
use crate::mac_address::MacAddress;
use crate::object;
use crate::option_list::OptionList;
use crate::tap_files::TapFiles;

/// Most queues: each pair has a thread.
const MAX_QUEUES: u16 = 64;
/// Least size of a queue: a packet without merged buffers takes as many descriptors as it has pages.
const MIN_QUEUE_SIZE: u16 = 32;
/// Largest size of a queue.
const MAX_QUEUE_SIZE: u16 = 1024;
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

/// A network device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NetConfig {
    /// The tap interface of the host, which is made if it is not there; without a name, a new one: `vmtap0` and so on.
    #[serde(default)]
    pub tap: Option<String>,
    /// IPv4 or IPv6 address of the host on the interface, if that is made.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub ip: Option<IpAddr>,
    /// Network mask of that address, of the same family. The default is 255.255.255.0 or ffff:ffff:ffff:ffff::.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub mask: Option<IpAddr>,
    /// Address of the guest's device; one is made up where nothing is said.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub mac: Option<MacAddress>,
    /// Address of the host's side of the interface, if that is to be another than it has.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub host_mac: Option<MacAddress>,
    /// Most bytes of a packet without its Ethernet header, which the interface gets too; otherwise it is the interface's.
    #[serde(default)]
    #[schema(value_type = Option<u64>, minimum = 68, maximum = 65535)]
    pub mtu: Option<u16>,
    /// Whether the device is behind the virtio-iommu.
    #[serde(default)]
    pub iommu: bool,
    /// Queues, an even number from 2 to 64: half of them receive. Each pair has a thread.
    #[serde(default = "default_queues")]
    #[schema(value_type = u64, minimum = 2, maximum = 64)]
    pub num_queues: u16,
    /// Size of each queue, a power of two from 32 to 1024.
    #[serde(default = "default_queue_size")]
    #[schema(value_type = u64, minimum = 32, maximum = 1024)]
    pub queue_size: u16,
    /// Whether segments of TCP may come and go as one packet.
    #[serde(default = "yes")]
    pub offload_tso: bool,
    /// Whether segments of UDP may, where the host's kernel can.
    #[serde(default = "yes")]
    pub offload_ufo: bool,
    /// Whether checksums may be left to the other side.
    #[serde(default = "yes")]
    pub offload_csum: bool,
    /// Whether a vhost-user server moves the packets. It is given all guest RAM, which must be shared.
    #[serde(default)]
    pub vhost_user: bool,
    /// Socket that the server listens on.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub vhost_socket: Option<PathBuf>,
    /// Which side listens: the server must.
    #[serde(default)]
    pub vhost_mode: VhostMode,
    /// Limit on its rate, of each direction for itself.
    #[serde(default, deserialize_with = "object::or_null")]
    pub rate_limiter_config: Option<RateLimiterConfig>,
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

impl Default for NetConfig {
    /// A new interface of the host, with all that it can.
    fn default() -> Self {
        Self {
            tap: None,
            ip: None,
            mask: None,
            mac: None,
            host_mac: None,
            mtu: None,
            iommu: false,
            pci_segment: 0,
            pci_device_id: None,
            num_queues: default_queues(),
            queue_size: default_queue_size(),
            offload_tso: true,
            offload_ufo: true,
            offload_csum: true,
            vhost_user: false,
            vhost_socket: None,
            vhost_mode: VhostMode::Client,
            rate_limiter_config: None,
            id: None,
            fds: Vec::new(),
            files: TapFiles::default(),
            inherited: Vec::new(),
        }
    }
}

fn default_queues() -> u16 {
    2
}

fn default_queue_size() -> u16 {
    256
}

fn yes() -> bool {
    true
}

impl NetConfig {
    /// The option.
    pub const OPTION: Field = Field::new("--net", "net");
    /// [`Self::tap`].
    pub const TAP: Field = Self::OPTION.key("tap");
    /// [`Self::ip`].
    pub const IP: Field = Self::OPTION.key("ip");
    /// [`Self::mask`].
    pub const MASK: Field = Self::OPTION.key("mask");
    /// [`Self::mac`].
    pub const MAC: Field = Self::OPTION.key("mac");
    /// [`Self::host_mac`].
    pub const HOST_MAC: Field = Self::OPTION.key("host_mac");
    /// [`Self::mtu`].
    pub const MTU: Field = Self::OPTION.key("mtu");
    /// [`Self::num_queues`].
    pub const NUM_QUEUES: Field = Self::OPTION.key("num_queues");
    /// [`Self::queue_size`].
    pub const QUEUE_SIZE: Field = Self::OPTION.key("queue_size");
    /// [`Self::iommu`].
    pub const IOMMU: Field = Self::OPTION.key("iommu");
    /// [`Self::vhost_user`].
    pub const VHOST_USER: Field = Self::OPTION.key("vhost_user");
    /// [`Self::vhost_socket`].
    pub const VHOST_SOCKET: Field = Self::OPTION.keys("socket", "vhost_socket");
    /// [`Self::vhost_mode`].
    pub const VHOST_MODE: Field = Self::OPTION.key("vhost_mode");
    /// [`Self::rate_limiter_config`].
    pub const RATE_LIMIT: Field = Self::OPTION.keys("", "rate_limiter_config");
    /// Descriptors of the interface.
    pub const FD: Field = Self::OPTION.keys("fd", "fds");

    /// The kind.
    pub const KIND: Kind = Kind {
        name: "net",
        field: Self::OPTION,
        number: Number::Many,
        value: "tap=NAME,…",
        help: "Network device: [tap=NAME|fd=N|fd=[N,N]][,ip=ADDRESS][,mask=MASK][,mac=ADDRESS][,host_mac=ADDRESS][,mtu=BYTES][,iommu=on|off][,num_queues=2][,queue_size=256][,offload_tso=on|off][,offload_ufo=on|off][,offload_csum=on|off][,vhost_user=on|off,socket=FILE][,vhost_mode=client][,bw_size=BYTES,bw_refill_time=MS][,bw_one_time_burst=BYTES][,ops_size=N,ops_refill_time=MS][,ops_one_time_burst=N][,pci_segment=N][,pci_device_id=N][,id=NAME]",
        bare: None,
        id: "_net",
        takes_slot: true,
        passed_through: false,
        iommu: Some(Self::IOMMU),
        default_for_clients: false,
        add: Some(Add {
            operation: "vm.add-net",
            id: "addNetVM",
            summary: "Adds a network device, to a running VM too. Files of the tap interface may come as descriptors, one for each pair of queues.",
            schema: "NetConfig",
            verb: "add-net",
            about: "Add a network device, to a running guest too: [tap=NAME][,ip=ADDRESS][,mask=MASK][,mac=ADDRESS][,iommu=on|off][,vhost_user=on,socket=FILE][,…][,pci_segment=N][,pci_device_id=N][,id=NAME]",
        }),
        parse: |text| text.parse().map(PartConfig::Net),
        read: |bytes| body::parse_device(bytes, Self::OPTION).map(PartConfig::Net),
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
        let opened = "is for an interface that the program opens, not for descriptors";
        if self.vhost_user {
            return Err(ConfigError::new(Self::VHOST_USER, "is for a device without descriptors of an interface"));
        }
        for (field, given) in [(Self::TAP, self.tap.is_some()), (Self::HOST_MAC, self.host_mac.is_some())] {
            if given {
                return Err(ConfigError::new(field, opened));
            }
        }
        if count != usize::from(pairs) {
            return Err(ConfigError::new(Self::FD, format!("{count} came, not {pairs}: one for each two queues")));
        }
        Ok(())
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
        if self.vhost_mode == VhostMode::Server {
            return refused(
                Self::VHOST_MODE,
                "must be that of a client: the server listens, and this program connects to it",
            );
        }
        check_socket(Self::VHOST_SOCKET, socket)?;
        let servers = "is for a tap interface; with vhost_user on, the server has its own: leave it out";
        for (field, given) in [
            (Self::TAP, self.tap.is_some()),
            (Self::IP, self.ip.is_some()),
            (Self::MASK, self.mask.is_some()),
            (Self::HOST_MAC, self.host_mac.is_some()),
            (Self::FD, !self.fds.is_empty()),
            (Self::RATE_LIMIT, self.rate_limiter_config.is_some()),
        ] {
            if given {
                return refused(field, servers);
            }
        }
        check_memory(Self::VHOST_SOCKET, memory)
    }
}

impl KindConfig for NetConfig {
    usual_methods!(Net);

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
        let Self { num_queues, queue_size, .. } = *self;
        let (field, rule) = if !num_queues.is_multiple_of(2) || !(2..=MAX_QUEUES).contains(&num_queues) {
            (Self::NUM_QUEUES, format!("{num_queues} is no even number from 2 to {MAX_QUEUES}"))
        } else if !queue_size.is_power_of_two() || !(MIN_QUEUE_SIZE..=MAX_QUEUE_SIZE).contains(&queue_size) {
            let rule = format!("{queue_size} is no power of two from {MIN_QUEUE_SIZE} to {MAX_QUEUE_SIZE}");
            (Self::QUEUE_SIZE, rule)
        } else if let Some(mtu) = self.mtu
            && mtu < MIN_MTU
        {
            (Self::MTU, format!("{mtu} is less than {MIN_MTU}"))
        } else if self.tap.as_deref().is_some_and(|name| !is_interface_name(name)) {
            (Self::TAP, format!("is no name of an interface: 1 to {MAX_NAME} bytes without '/', ':', '%' and blanks"))
        } else if self.mask.is_some() && self.ip.is_none() {
            (Self::MASK, "is used with ip only".to_string())
        } else if let (Some(ip), Some(mask)) = (self.ip, self.mask)
            && ip.is_ipv6() != mask.is_ipv6()
        {
            let family = if ip.is_ipv6() { "IPv6" } else { "IPv4" };
            (Self::MASK, format!("{mask} is of another family than ip: an {family} address needs an {family} mask"))
        } else if self.mask.is_some_and(|mask| prefix_length(mask).is_none()) {
            (Self::MASK, "has bits that are set behind others that are not".to_string())
        } else if !self.fds.is_empty() {
            let rule = "are numbers of the client: descriptors come with the request itself (SCM_RIGHTS), one for each two queues";
            (Self::FD, rule.to_string())
        } else {
            return self.rate_limiter_config.map_or(Ok(()), |limit| limit.check(Self::OPTION));
        };
        Err(ConfigError::new(field, rule))
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

impl FromStr for NetConfig {
    type Err = ConfigError;

    /// Parses any of the keys; the text may be empty.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let keys = [
            "tap",
            "fd",
            "ip",
            "mask",
            "mac",
            "host_mac",
            "mtu",
            "iommu",
            "num_queues",
            "queue_size",
            "offload_tso",
            "offload_ufo",
            "offload_csum",
            "vhost_user",
            "socket",
            "vhost_socket",
            "vhost_mode",
            "pci_segment",
            "pci_device_id",
            "id",
        ];
        let list = OptionList::parse(Self::OPTION, text, &[&keys, &RATE_KEYS[..]].concat())?;
        let address = |key: &'static str| {
            let address = list.get(key).map(str::parse).transpose();
            let rule = "is no IP address, such as 192.168.249.1 or fd00::1";
            address.map_err(|_| ConfigError::new(Self::OPTION.key(key), rule))
        };
        let mac = |field: Field, key: &str| {
            let mac = list.get(key).map(str::parse::<MacAddress>).transpose();
            mac.map_err(|rule| ConfigError::new(field, rule))
        };
        let modes = [("client", VhostMode::Client), ("server", VhostMode::Server)];
        let inherited = descriptors(&list)?;
        // As many as there are descriptors for, where nothing is said.
        let queues = u16::try_from(inherited.len().max(1) * 2).unwrap_or(u16::MAX);
        Ok(Self {
            tap: list.get("tap").map(str::to_string),
            ip: address("ip")?,
            mask: address("mask")?,
            mac: mac(Self::MAC, "mac")?,
            host_mac: mac(Self::HOST_MAC, "host_mac")?,
            mtu: list.number("mtu")?,
            iommu: list.toggle("iommu", false)?,
            pci_segment: list.segment()?,
            pci_device_id: list.number("pci_device_id")?,
            num_queues: list.number("num_queues")?.unwrap_or(queues),
            queue_size: list.number("queue_size")?.unwrap_or_else(default_queue_size),
            offload_tso: list.toggle("offload_tso", true)?,
            offload_ufo: list.toggle("offload_ufo", true)?,
            offload_csum: list.toggle("offload_csum", true)?,
            vhost_user: list.toggle("vhost_user", false)?,
            vhost_socket: vhost_user::socket(&list, Self::VHOST_SOCKET)?,
            vhost_mode: list.choice("vhost_mode", &modes)?.unwrap_or_default(),
            rate_limiter_config: RateLimiterConfig::parse(&list, Self::OPTION)?,
            id: list.get("id").map(str::to_string),
            fds: Vec::new(),
            files: TapFiles::default(),
            inherited,
        })
    }
}

/// The numbers of `fd=N` or `fd=[N,N]`.
fn descriptors(list: &OptionList) -> Result<Vec<i32>, ConfigError> {
    let refused = |rule: String| Err(ConfigError::new(NetConfig::FD, rule));
    if list.get("fd").is_none() {
        return Ok(Vec::new());
    }
    let mut numbers = Vec::new();
    for text in list.texts("fd")? {
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

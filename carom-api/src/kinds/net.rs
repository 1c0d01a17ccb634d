// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Network devices whose other side is a tap interface of the host, or a vhost-user server.

use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::vhost_user::{check_memory, check_socket, toggle};
use super::{Add, HostFile, Kind, KindConfig, Number, PartConfig, usual_methods};
use crate::body;
use crate::config::{MemoryConfig, RATE_KEYS, RateLimiterConfig};
use crate::error::{ConfigError, one_line};
use crate::field::Field;
use crate::mac_address::MacAddress;
use crate::object;
use crate::option_list::OptionList;
use crate::tap_files::TapFiles;

/// Most queues: each has a thread.
const MAX_QUEUES: u16 = 64;
/// Least size of a queue: a packet without merged buffers takes as many descriptors as it has pages.
const MIN_QUEUE_SIZE: u16 = 32;
/// Largest size of a queue.
const MAX_QUEUE_SIZE: u16 = 1024;
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
    /// IPv4 address of the host on the interface, if that is made.
    #[serde(default)]
    #[schema(value_type = Option<String>, format = "ipv4")]
    pub ip: Option<Ipv4Addr>,
    /// Network mask beside it; 255.255.255.0 where nothing is said.
    #[serde(default)]
    #[schema(value_type = Option<String>, format = "ipv4")]
    pub mask: Option<Ipv4Addr>,
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
    /// Queues, an even number from 2 to 64: half of them receive. Each has a thread.
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
        help: "Network device: [tap=NAME|fd=N|fd=[N,N]][,ip=ADDRESS][,mask=MASK][,mac=ADDRESS][,host_mac=ADDRESS][,mtu=BYTES][,iommu=on|off][,num_queues=2][,queue_size=256][,offload_tso=on|off][,offload_ufo=on|off][,offload_csum=on|off][,vhost_user=on|off,socket=FILE][,vhost_mode=client][,bw_size=BYTES,bw_refill_time=MS][,bw_one_time_burst=BYTES][,ops_size=N,ops_refill_time=MS][,ops_one_time_burst=N][,pci_segment=N][,id=NAME]",
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
            about: "Add a network device, to a running guest too: [tap=NAME][,ip=ADDRESS][,mask=MASK][,mac=ADDRESS][,iommu=on|off][,vhost_user=on,socket=FILE][,…][,pci_segment=N][,id=NAME]",
        }),
        parse: |text| text.parse().map(PartConfig::Net),
        read: |bytes| body::parse_device(bytes, Self::OPTION).map(PartConfig::Net),
    };

    /// Pairs of queues, one to receive and one to transmit.
    pub fn pairs(&self) -> u16 {
        self.num_queues / 2
    }

    /// Gives the device an interface that a client has open.
    ///
    /// # Errors
    /// There is not a file for each pair of queues, or the interface is named too, or another process's.
    pub fn take_files(&mut self, files: Vec<OwnedFd>) -> Result<(), ConfigError> {
        self.check_descriptors(files.len())?;
        self.files = TapFiles::new(files);
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
        } else if self.mask.is_some_and(|mask| mask.to_bits().count_zeros() != mask.to_bits().trailing_zeros()) {
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
            "id",
        ];
        if text.is_empty() {
            return Ok(Self::default());
        }
        let list = OptionList::parse(Self::OPTION, text, &[&keys, &RATE_KEYS[..]].concat())?;
        let number = |key: &'static str| match list.get(key).map(str::parse) {
            None => Ok(None),
            Some(Ok(number)) => Ok(Some(number)),
            Some(Err(_)) => Err(ConfigError::new(Self::OPTION.key(key), "is no number that fits")),
        };
        let address = |key: &'static str| match list.get(key).map(str::parse) {
            None => Ok(None),
            Some(Ok(address)) => Ok(Some(address)),
            Some(Err(_)) => Err(ConfigError::new(Self::OPTION.key(key), "is no IPv4 address, such as 192.168.249.1")),
        };
        let mac = |field: Field, key: &str| {
            let mac = list.get(key).map(str::parse::<MacAddress>).transpose();
            mac.map_err(|rule| ConfigError::new(field, rule))
        };
        let vhost_mode = match list.get("vhost_mode") {
            None | Some("client") => VhostMode::Client,
            Some("server") => VhostMode::Server,
            Some(other) => {
                let rule = format!("'{other}' is neither 'client' nor 'server'");
                return Err(ConfigError::new(Self::VHOST_MODE, rule));
            }
        };
        let inherited = descriptors(&list)?;
        // As many as there are descriptors for, where nothing is said.
        let queues = u16::try_from(inherited.len().max(1) * 2).unwrap_or(u16::MAX);
        if list.get("socket").is_some() && list.get("vhost_socket").is_some() {
            return Err(ConfigError::new(Self::VHOST_SOCKET, "is given twice, as vhost_socket too"));
        }
        Ok(Self {
            tap: list.get("tap").map(str::to_string),
            ip: address("ip")?,
            mask: address("mask")?,
            mac: mac(Self::MAC, "mac")?,
            host_mac: mac(Self::HOST_MAC, "host_mac")?,
            mtu: number("mtu")?,
            iommu: list.toggle("iommu", false)?,
            pci_segment: list.segment()?,
            num_queues: number("num_queues")?.unwrap_or(queues),
            queue_size: number("queue_size")?.unwrap_or_else(default_queue_size),
            offload_tso: list.toggle("offload_tso", true)?,
            offload_ufo: list.toggle("offload_ufo", true)?,
            offload_csum: list.toggle("offload_csum", true)?,
            vhost_user: toggle(&list, Self::VHOST_USER, "vhost_user")?,
            // As Cloud Hypervisor's command line has it, and as its API and disks do.
            vhost_socket: list.get("socket").or(list.get("vhost_socket")).map(PathBuf::from),
            vhost_mode,
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
    for text in list.texts("fd") {
        match text.parse::<i32>() {
            Ok(number) if numbers.contains(&number) => return refused(format!("{number} is given twice")),
            Ok(number) if number > 2 => numbers.push(number),
            _ => return refused(format!("'{}' is no descriptor above 2", one_line(&text))),
        }
    }
    if numbers.is_empty() { refused("names no descriptor".into()) } else { Ok(numbers) }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;
    use crate::error::Explain;
    use crate::field::Terms;

    fn net(text: &str) -> NetConfig {
        text.parse().unwrap()
    }

    #[test]
    fn device_parses_as_cloud_hypervisor_spells_it() {
        let plain = net("");
        assert_eq!(plain, serde_json::from_str("{}").unwrap());
        assert_eq!((plain.num_queues, plain.queue_size, plain.offload_tso, plain.iommu), (2, 256, true, false));
        let text = "tap=tap0,ip=10.0.0.1,mask=255.255.0.0,mac=02:00:00:00:00:01,host_mac=02:00:00:00:00:02,mtu=9000,iommu=on,num_queues=4,queue_size=512,\
                    offload_tso=off,offload_ufo=off,offload_csum=off,pci_segment=0,id=n";
        let json = r#"{"tap": "tap0", "ip": "10.0.0.1", "mask": "255.255.0.0", "mac": "02:00:00:00:00:01",
            "host_mac": "02:00:00:00:00:02", "mtu": 9000, "iommu": true,
            "num_queues": 4, "queue_size": 512, "offload_tso": false, "offload_ufo": false, "offload_csum": false, "id": "n"}"#;
        assert_eq!(net(text), serde_json::from_str(json).unwrap());
        assert_eq!(net(text).pairs(), 2);
    }

    #[test]
    fn malformed_devices_name_option_and_rule() {
        let refused = |text: &str| text.parse::<NetConfig>().unwrap_err().to_string();
        assert_eq!(refused("iommu=yes"), "--net iommu: 'yes' is neither 'on' nor 'off'");
        assert_eq!(refused("ip=fd00::1"), "--net ip: is no IPv4 address, such as 192.168.249.1");
        assert_eq!(refused("mtu=65536"), "--net mtu: is no number that fits");
        assert!(refused("host_mac=01:00:00:00:00:00").starts_with("--net host_mac: is an address of a group"));
        assert!(refused("mac=02:00").starts_with("--net mac: is no address of the form"));
        assert_eq!(refused("pci_segment=x"), "--net pci_segment: is no number that fits");
        assert_eq!(refused("fd=2"), "--net fd: '2' is no descriptor above 2");
        assert_eq!(refused("fd=[3,x]"), "--net fd: 'x' is no descriptor above 2");
        assert_eq!(refused("fd=[3,4,3]"), "--net fd: 3 is given twice");
        assert_eq!(refused("fd=[]"), "--net fd: names no descriptor");
        let json = serde_json::from_str::<NetConfig>(r#"{"mac": "01:00:00:00:00:01"}"#).unwrap_err().to_string();
        assert!(json.contains("is an address of a group"), "{json}");
    }

    #[test]
    fn queues_name_and_mask_are_checked() {
        let memory = MemoryConfig::default();
        for (text, field) in [
            ("num_queues=0", NetConfig::NUM_QUEUES),
            ("num_queues=3", NetConfig::NUM_QUEUES),
            ("num_queues=66", NetConfig::NUM_QUEUES),
            ("queue_size=16", NetConfig::QUEUE_SIZE),
            ("queue_size=100", NetConfig::QUEUE_SIZE),
            ("mtu=67", NetConfig::MTU),
            ("tap=sixteen-bytes-xx", NetConfig::TAP),
            ("tap=tap%d", NetConfig::TAP),
            ("tap=..", NetConfig::TAP),
            ("mask=255.255.255.0", NetConfig::MASK),
            ("ip=10.0.0.1,mask=255.0.255.0", NetConfig::MASK),
        ] {
            let error = net(text).check(&memory).unwrap_err();
            assert_eq!(error.field, field, "{text}");
            assert!(error.explain(Terms::Json).starts_with("net."), "{error}");
        }
        let most = net("tap=fifteen-bytes-x,num_queues=64,queue_size=1024,mtu=65535,ip=10.0.0.1,mask=0.0.0.0");
        assert_eq!(most.check(&memory), Ok(()));
    }

    #[test]
    fn card_of_a_server_parses_as_cloud_hypervisor_spells_it() {
        let on = net("vhost_user=true,socket=/s,vhost_mode=client,num_queues=4");
        assert_eq!(net("vhost_user=on,vhost_socket=/s,num_queues=4"), on);
        let json = r#"{"vhost_user": true, "vhost_socket": "/s", "vhost_mode": "Client", "num_queues": 4}"#;
        assert_eq!(on, serde_json::from_str(json).unwrap());
        let shared = MemoryConfig { shared: true, ..MemoryConfig::default() };
        assert_eq!(on.check(&shared), Ok(()));
        assert_eq!(net("vhost_user=on,socket=/s,iommu=on").check(&shared), Ok(()));
        let error = on.check(&MemoryConfig::default()).unwrap_err();
        assert_eq!(error.field, NetConfig::VHOST_SOCKET);
        assert!(error.explain(Terms::Json).starts_with("net.vhost_socket: "), "{error}");
        let twice = "vhost_user=on,socket=/s,vhost_socket=/s".parse::<NetConfig>().unwrap_err();
        assert_eq!(twice.to_string(), "--net socket: is given twice, as vhost_socket too");
        let mode = "vhost_mode=both".parse::<NetConfig>().unwrap_err();
        assert_eq!(mode.to_string(), "--net vhost_mode: 'both' is neither 'client' nor 'server'");
        for (text, field) in [
            ("vhost_user=on", NetConfig::VHOST_USER),
            ("socket=/s", NetConfig::VHOST_SOCKET),
            ("vhost_mode=server", NetConfig::VHOST_MODE),
            ("vhost_user=on,socket=/s,vhost_mode=server", NetConfig::VHOST_MODE),
            ("vhost_user=on,socket=/s,tap=t", NetConfig::TAP),
            ("vhost_user=on,socket=/s,ip=10.0.0.1", NetConfig::IP),
            ("vhost_user=on,socket=/s,mask=255.0.0.0", NetConfig::MASK),
            ("vhost_user=on,socket=/s,host_mac=02:00:00:00:00:02", NetConfig::HOST_MAC),
            ("vhost_user=on,socket=/s,bw_size=1,bw_refill_time=1", NetConfig::RATE_LIMIT),
            ("vhost_user=on,socket=/s,num_queues=3", NetConfig::NUM_QUEUES),
            ("vhost_user=on,socket=/s,mtu=1", NetConfig::MTU),
        ] {
            assert_eq!(net(text).check(&shared).unwrap_err().field, field, "{text}");
        }
        let file = File::open("/dev/null").unwrap();
        let refused = net("vhost_user=on,socket=/s").take_files(vec![file.into()]).unwrap_err();
        assert_eq!(refused.field, NetConfig::VHOST_USER);
        let (one, other) = (net("vhost_user=on,socket=/s"), net("vhost_user=on,socket=/s,num_queues=4"));
        let (one, other): (&dyn KindConfig, &dyn KindConfig) = (&one, &other);
        assert_eq!(one.same_as(other).map(|(field, _)| field), Some(NetConfig::VHOST_SOCKET));
    }

    #[test]
    fn interface_belongs_to_one_device_and_a_made_up_address_stays() {
        let conflict = |one: &str, other: &str| {
            let (one, other) = (net(one), net(other));
            let (one, other): (&dyn KindConfig, &dyn KindConfig) = (&one, &other);
            one.same_as(other).map(|(field, _)| field)
        };
        assert_eq!(conflict("tap=a", "tap=a"), Some(NetConfig::TAP));
        assert_eq!((conflict("tap=a", "tap=b"), conflict("", "")), (None, None));
        let mut device = net("");
        device.complete();
        let made = device.mac;
        assert!(made.is_some());
        device.complete();
        assert_eq!(device.mac, made);
    }

    #[test]
    fn descriptors_are_as_many_as_pairs_of_queues() {
        let files = |count| (0..count).map(|_| File::open("/dev/null").unwrap().into()).collect::<Vec<OwnedFd>>();
        let mut device = net("num_queues=4");
        assert_eq!(device.take_files(files(1)).unwrap_err().field, NetConfig::FD);
        assert_eq!(device.take_files(files(2)), Ok(()));
        assert_eq!(device.files.iter().count(), 2);
        assert_eq!((device.clone() == device, net("num_queues=4") == device), (true, false));
        assert_eq!(net("tap=a").take_files(files(1)).unwrap_err().field, NetConfig::TAP);
        let named = net("host_mac=02:00:00:00:00:02").take_files(files(1));
        assert_eq!(named.unwrap_err().field, NetConfig::HOST_MAC);
    }

    #[test]
    fn descriptors_of_the_command_line_say_how_many_queues_there_are() {
        let memory = MemoryConfig::default();
        for (text, numbers, queues) in
            [("fd=3", &[3][..], 2), ("fd=[3,4]", &[3, 4], 4), ("fd=[3],num_queues=2", &[3], 2)]
        {
            let device = net(text);
            assert_eq!((device.inherited.as_slice(), device.num_queues), (numbers, queues), "{text}");
            assert_eq!(device.check(&memory), Ok(()));
            assert!(device.files().is_empty(), "nothing is opened");
        }
        for (text, field) in [
            ("fd=[3,4],num_queues=2", NetConfig::FD),
            ("fd=3,num_queues=4", NetConfig::FD),
            ("fd=3,tap=t", NetConfig::TAP),
            ("fd=3,host_mac=02:00:00:00:00:02", NetConfig::HOST_MAC),
        ] {
            assert_eq!(net(text).check(&memory).unwrap_err().field, field, "{text}");
        }
        let shared = MemoryConfig { shared: true, ..memory };
        let served = net("fd=3,vhost_user=on,socket=/s").check(&shared).unwrap_err();
        assert_eq!(served.field, NetConfig::VHOST_USER);
    }

    #[test]
    fn numbers_of_a_clients_descriptors_are_taken_where_these_come_and_refused_where_not() {
        let read = || match NetConfig::KIND.read(br#"{"fds": [9]}"#).unwrap() {
            PartConfig::Net(device) => device,
            other => panic!("{other:?}"),
        };
        let mut device = read();
        device.take_files(vec![File::open("/dev/null").unwrap().into()]).unwrap();
        assert_eq!(device.check(&MemoryConfig::default()), Ok(()));
        assert!(serde_json::to_value(&device).unwrap().get("fds").is_none());
        let refused = read().check(&MemoryConfig::default()).unwrap_err();
        assert!(
            refused.explain(Terms::Json).contains("fds: are numbers of the client"),
            "{}",
            refused.explain(Terms::Json)
        );
    }
}

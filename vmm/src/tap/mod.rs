// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tap and macvtap interfaces of the host, which connect the guest's network devices to the host's network.

mod ioctl;
mod macvtap;

use std::fs::{File, OpenOptions};
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use devices::virtio::net::spec::HEADER_BYTES;
use devices::virtio::net::{Carrier, Offloads};
use libc::{TUN_F_CSUM, TUN_F_TSO_ECN, TUN_F_TSO4, TUN_F_TSO6, TUN_F_USO4, TUN_F_USO6};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use macvtap::Macvtap;

/// File through which tap interfaces are created.
const TUN: &str = "/dev/net/tun";
/// Default name of a new interface. The kernel replaces `%d` by a number.
const ANY_NAME: &str = "vmtap%d";
/// Default MTU of an interface that a client or the parent process opened. The interface may be in another network namespace, so this
/// process cannot read its MTU.
const DEFAULT_MTU: u16 = 1500;

/// Maximum MTU of a tap interface: the largest frame (`ETH_MAX_MTU`) without its Ethernet header.
const MAX_MTU: u16 = u16::MAX - 14;

/// Returns an error that names the property of an interface that could not be set.
fn not_set(what: &str, error: io::Error) -> io::Error {
    io::Error::new(
        error.kind(),
        format!("cannot set {what}: {error}; if carom has no CAP_NET_ADMIN, leave this setting out"),
    )
}

/// Options for opening an interface.
#[derive(Clone, Copy, Debug)]
pub struct TapOptions<'o> {
    /// Name of the interface. By default, the kernel chooses a name.
    pub name: Option<&'o str>,
    /// Number of queue pairs. A file is opened for each pair.
    pub pairs: u16,
    /// Host's IP address on a newly created interface, and the number of bits of its network mask.
    pub address: Option<(IpAddr, u32)>,
    /// New Ethernet address of the host's side, if the address must change.
    pub mac: Option<[u8; 6]>,
    /// Ethernet address of the guest's device. A macvtap interface must have this address, because it receives no packets for other
    /// addresses.
    pub guest_mac: Option<[u8; 6]>,
    /// New MTU, if the MTU must change.
    pub mtu: Option<u16>,
}

/// Interface that this process has opened, with a file for each pair of queues.
pub struct Tap {
    files: Vec<File>,
    mtu: u16,
    has_uso: bool,
    /// Number of queue pairs that the host uses.
    used: Mutex<u16>,
}

fn tap_flags(pairs: u16) -> u16 {
    let multi = if pairs > 1 { libc::IFF_MULTI_QUEUE } else { 0 };
    u16::try_from(libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | multi).unwrap_or_default()
}

fn check(file: &File) -> io::Result<()> {
    check_descriptor(file.as_fd())
}

/// Checks that a descriptor is attached to a tap interface with the required flags.
///
/// # Errors
/// The descriptor is not attached to such an interface.
pub fn check_descriptor(file: BorrowedFd<'_>) -> io::Result<()> {
    let is_tap = |flags: u16| flags & tap_flags(1) == tap_flags(1);
    if ioctl::interface_flags(file).is_ok_and(is_tap) {
        return Ok(());
    }
    Err(io::Error::other(
        "the descriptor does not belong to a tap interface with IFF_TAP, IFF_NO_PI and IFF_VNET_HDR: set these flags (TUNSETIFF)",
    ))
}

/// Checks that all files belong to one interface.
fn check_that_all_are_of_one(files: &[File]) -> io::Result<()> {
    let names = files.iter().map(|file| ioctl::interface_name(file.as_fd())).collect::<io::Result<Vec<_>>>()?;
    match names.iter().find(|name| **name != names[0]) {
        Some(other) => {
            Err(io::Error::other(format!("the descriptors belong to {} and {other}: use one interface", names[0])))
        }
        None => Ok(()),
    }
}

/// Sets the MTU of an interface if requested, and brings the interface up. Returns the MTU. If the requested MTU is too large, the error
/// contains `limit`, a text about the maximum.
fn bring_up(socket: BorrowedFd<'_>, name: &str, mtu: Option<u16>, limit: &str) -> io::Result<u16> {
    if let Some(mtu) = mtu {
        ioctl::set_mtu(socket, name, mtu.into()).map_err(|error| match error.raw_os_error() {
            Some(libc::EINVAL) => io::Error::new(error.kind(), format!("cannot have an MTU of {mtu} (mtu): {limit}")),
            _ => not_set("the MTU (mtu)", error),
        })?;
    }
    let (flags, up) = (ioctl::flags(socket, name)?, u16::try_from(libc::IFF_UP).unwrap_or_default());
    if flags & up == 0 {
        ioctl::set_flags(socket, name, flags | up)?;
    }
    Ok(u16::try_from(ioctl::mtu(socket, name)?).unwrap_or(u16::MAX))
}

/// Returns the character device of this interface, if it is a macvtap interface.
pub fn character_device(name: &str) -> Option<PathBuf> {
    macvtap::find(name).map(|macvtap| macvtap.node().to_path_buf())
}

impl Tap {
    /// Opens an interface and configures it. If no interface has the name, creates a tap interface, which the kernel removes when its files
    /// are closed.
    ///
    /// # Errors
    /// The host rejects an operation on the interface.
    pub fn open(options: &TapOptions<'_>) -> io::Result<Self> {
        let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        let socket = socket.as_fd();
        if let Some((name, macvtap)) = options.name.and_then(|name| Some((name, macvtap::find(name)?))) {
            return Self::open_macvtap(socket, name, &macvtap, options);
        }
        let was_there = options.name.is_some_and(|name| ioctl::flags(socket, name).is_ok());
        let (mut name, mut files) = (options.name.unwrap_or(ANY_NAME).to_string(), Vec::new());
        for _ in 0..options.pairs {
            let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(TUN)?;
            name = ioctl::set_interface(file.as_fd(), &name, tap_flags(options.pairs)).map_err(|error| {
                if was_there && error.kind() == io::ErrorKind::InvalidInput {
                    let kind = if options.pairs > 1 { "with several queues" } else { "with one queue" };
                    return io::Error::other(format!(
                        "already exists, but is not a tap interface {kind}: use another name, or create the interface again with ip tuntap"
                    ));
                }
                if error.raw_os_error() == Some(libc::EBUSY) {
                    return io::Error::new(
                        error.kind(),
                        "is in use by another process, or has its maximum number of queues: use another interface",
                    );
                }
                error
            })?;
            files.push(file);
        }
        if let Some((ip, prefix)) = options.address {
            let no_address = |error| not_set(&format!("the address {ip}/{prefix} (ip)"), error);
            match ip {
                _ if was_there => log::warn!(
                    "{name} already exists and keeps its address: ip is ignored; set the address on the host, and remove ip"
                ),
                IpAddr::V4(ip) => ioctl::set_address(socket, &name, ip, prefix).map_err(no_address)?,
                IpAddr::V6(ip) => {
                    let socket = socket_with(AddressFamily::INET6, SocketType::DGRAM, SocketFlags::CLOEXEC, None);
                    let socket = socket.map_err(|error| no_address(error.into()))?;
                    ioctl::set_address_v6(socket.as_fd(), &name, ip, prefix).map_err(no_address)?;
                }
            }
        }
        if let Some(mac) = options.mac {
            ioctl::set_mac(socket, &name, mac).map_err(|error| not_set("the host's address (host_mac)", error))?;
        }
        let limit = format!("the maximum of a tap interface is {MAX_MTU}");
        let mtu = bring_up(socket, &name, options.mtu, &limit)?;
        if options.name.is_none() {
            log::info!("{name} is the host side of a network device");
        }
        Self::of(files, mtu)
    }

    /// Opens a macvtap interface, and gives it the Ethernet address of the guest's device.
    fn open_macvtap(
        socket: BorrowedFd<'_>,
        name: &str,
        macvtap: &Macvtap,
        options: &TapOptions<'_>,
    ) -> io::Result<Self> {
        if options.mac.is_some() {
            return Err(io::Error::other(
                "is a macvtap interface, whose Ethernet address must be the guest's: remove host_mac",
            ));
        }
        if options.address.is_some() {
            log::warn!(
                "{name} is a macvtap interface, on which the host cannot have an IP address: ip is ignored; remove ip"
            );
        }
        let files = (0..options.pairs).map(|_| macvtap.open()).collect::<io::Result<Vec<File>>>()?;
        files.iter().try_for_each(check)?;
        if let Some(mac) = options.guest_mac.filter(|mac| !macvtap.has_address(*mac)) {
            ioctl::set_mac(socket, name, mac).map_err(|error| {
                let failed = "cannot set the Ethernet address of the macvtap interface to the guest's address (mac)";
                let remedy = "give carom CAP_NET_ADMIN, or set mac to the interface's address";
                io::Error::new(error.kind(), format!("{failed}: {error}; {remedy}"))
            })?;
        }
        let limit = "the maximum of a macvtap interface is the MTU of its lower interface";
        let mtu = bring_up(socket, name, options.mtu, limit)?;
        Self::of(files, mtu)
    }

    /// Creates a [`Tap`] for an interface that a client or the parent process opened. Each of `files` is one pair of queues.
    ///
    /// # Errors
    /// A file does not belong to a suitable tap interface, or the files belong to several interfaces.
    pub fn given<'f>(files: impl Iterator<Item = BorrowedFd<'f>>, mtu: Option<u16>) -> io::Result<Self> {
        let files: Vec<File> =
            files.map(|file| file.try_clone_to_owned().map(File::from)).collect::<io::Result<_>>()?;
        for file in &files {
            check(file)?;
            fcntl_setfl(file, fcntl_getfl(file)? | OFlags::NONBLOCK)?;
        }
        check_that_all_are_of_one(&files)?;
        Self::of(files, mtu.unwrap_or(DEFAULT_MTU))
    }

    fn of(files: Vec<File>, mtu: u16) -> io::Result<Self> {
        let first = files.first().ok_or(io::ErrorKind::InvalidInput)?;
        for file in &files {
            ioctl::set_header_len(file.as_fd(), i32::try_from(HEADER_BYTES).unwrap_or_default())?;
        }
        let has_uso = ioctl::set_offloads(first.as_fd(), TUN_F_CSUM | TUN_F_USO4 | TUN_F_USO6).is_ok();
        ioctl::set_offloads(first.as_fd(), 0)?;
        let used = u16::try_from(files.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        Ok(Self { files, mtu, has_uso, used: Mutex::new(used) })
    }

    /// Returns the MTU: the maximum bytes of a packet without its Ethernet header.
    pub fn mtu(&self) -> u16 {
        self.mtu
    }

    /// True if the host's kernel can segment UDP packets.
    pub fn has_uso(&self) -> bool {
        self.has_uso
    }
}

impl Carrier for Tap {
    fn file(&self, pair: u16) -> &File {
        &self.files[usize::from(pair)]
    }

    fn set_offloads(&self, offloads: Offloads) -> io::Result<()> {
        let Offloads { csum, tso4, tso6, ecn, uso } = offloads;
        let flags = [
            (csum, TUN_F_CSUM),
            (tso4, TUN_F_TSO4),
            (tso6, TUN_F_TSO6),
            // TUN_F_TSO_ECN has a meaning only together with TUN_F_TSO4 or TUN_F_TSO6.
            (ecn && (tso4 || tso6), TUN_F_TSO_ECN),
            (uso, TUN_F_USO4 | TUN_F_USO6),
        ];
        let flags = flags.into_iter().filter(|(wanted, _)| *wanted).fold(0, |all, (_, flag)| all | flag);
        ioctl::set_offloads(self.files[0].as_fd(), flags)
    }

    fn set_pairs(&self, pairs: u16) -> io::Result<()> {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        // The first pair always stays in use.
        while *used < pairs {
            ioctl::use_queue(self.file(*used).as_fd(), true)?;
            *used += 1;
        }
        while *used > pairs.max(1) {
            ioctl::use_queue(self.file(*used - 1).as_fd(), false)?;
            *used -= 1;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If the process cannot create an interface, for example without `CAP_NET_ADMIN`, this test checks nothing.
    #[test]
    fn new_interface_has_its_ipv6_address_or_names_what_is_refused() {
        let options = |mtu| TapOptions {
            name: None,
            pairs: 1,
            address: Some(("fd00:77::1".parse().unwrap(), 48)),
            mac: None,
            guest_mac: None,
            mtu,
        };
        let tap = match Tap::open(&options(None)) {
            Ok(tap) => tap,
            Err(error) => return eprintln!("not tested: {error}"),
        };
        let name = ioctl::interface_name(tap.file(0).as_fd()).unwrap();
        let addresses = std::fs::read_to_string("/proc/net/if_inet6").unwrap();
        // Each line has an address, index, length of the prefix, scope, flags and name.
        let of_name = |line: &&str| line.ends_with(&format!(" {name}")) && line.starts_with("fd000077");
        let line = addresses.lines().find(of_name).unwrap_or_else(|| panic!("{name}: {addresses}"));
        assert_eq!(line.split_whitespace().nth(2), Some("30"), "{line}");
        let error = Tap::open(&options(Some(u16::MAX))).err().unwrap().to_string();
        assert_eq!(error, "cannot have an MTU of 65535 (mtu): the maximum of a tap interface is 65521");
    }

    #[test]
    fn file_of_another_kind_is_not_an_interface() {
        let file = File::open("/dev/null").unwrap();
        let error = Tap::given([file.as_fd()].into_iter(), None).err().unwrap();
        assert!(error.to_string().starts_with("the descriptor does not belong to a tap interface"), "{error}");
    }
}

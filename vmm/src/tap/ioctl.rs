// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! ioctl calls of tap interfaces (`drivers/net/tun.c`, `drivers/net/tap.c`) and of network interfaces in general (`netdevice(7)`).
//! This file has all unsafe code of network devices.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsRawFd, BorrowedFd};

use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref, ioctl_with_val};

/// Bytes of an interface's name, including the terminating zero byte.
const NAME_LEN: usize = libc::IFNAMSIZ;

/// Name of an interface, and a value whose type depends on the call (`struct ifreq`).
#[repr(C)]
#[derive(Clone, Copy)]
struct Request {
    name: [u8; NAME_LEN],
    value: [u8; 24],
}

const _: () = assert!(size_of::<Request>() == size_of::<libc::ifreq>());

impl Request {
    fn new(name: &str) -> io::Result<Self> {
        let mut request = Self { name: [0; NAME_LEN], value: [0; 24] };
        if name.len() >= NAME_LEN {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        request.name[..name.len()].copy_from_slice(name.as_bytes());
        Ok(request)
    }

    fn with(name: &str, value: &[u8]) -> io::Result<Self> {
        let mut request = Self::new(name)?;
        request.value[..value.len()].copy_from_slice(value);
        Ok(request)
    }

    fn name(&self) -> String {
        let len = self.name.iter().position(|byte| *byte == 0).unwrap_or(NAME_LEN);
        String::from_utf8_lossy(&self.name[..len]).into_owned()
    }

    fn flags(&self) -> u16 {
        u16::from_ne_bytes([self.value[0], self.value[1]])
    }

    /// Makes an ioctl call that reads and writes the request.
    fn call(&mut self, file: BorrowedFd<'_>, number: libc::c_ulong) -> io::Result<()> {
        // SAFETY: Callers pass only ioctl numbers whose calls take a pointer to a `struct ifreq`, which has the size of `self`. These calls
        // access nothing beyond that structure.
        result(unsafe { ioctl_with_mut_ref(&file.as_raw_fd(), number, self) })
    }
}

fn result(status: libc::c_int) -> io::Result<()> {
    if status < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Attaches `file`, an open `/dev/net/tun`, to the interface `name`. If no such interface exists, the kernel creates it. Returns the
/// interface's name.
pub(super) fn set_interface(file: BorrowedFd<'_>, name: &str, flags: u16) -> io::Result<String> {
    let mut request = Request::with(name, &flags.to_ne_bytes())?;
    request.call(file, libc::TUNSETIFF)?;
    Ok(request.name())
}

/// Returns the flags of the interface that `file` is attached to.
pub(super) fn interface_flags(file: BorrowedFd<'_>) -> io::Result<u16> {
    let mut request = Request::new("")?;
    request.call(file, libc::TUNGETIFF)?;
    Ok(request.flags())
}

/// Returns the name that the interface of `file` has in its network namespace.
pub(super) fn interface_name(file: BorrowedFd<'_>) -> io::Result<String> {
    let mut request = Request::new("")?;
    request.call(file, libc::TUNGETIFF)?;
    Ok(request.name())
}

/// Sets the length, in bytes, of the header that precedes each packet (`struct virtio_net_hdr`).
pub(super) fn set_header_len(file: BorrowedFd<'_>, len: i32) -> io::Result<()> {
    // SAFETY: The call reads an `int`.
    result(unsafe { ioctl_with_ref(&file.as_raw_fd(), libc::TUNSETVNETHDRSZ, &len) })
}

/// Sets the offloads that the reader of the file supports.
pub(super) fn set_offloads(file: BorrowedFd<'_>, offloads: u32) -> io::Result<()> {
    // SAFETY: The call takes a number.
    result(unsafe { ioctl_with_val(&file.as_raw_fd(), libc::TUNSETOFFLOAD, offloads.into()) })
}

/// Enables or disables the file as a queue of its interface.
pub(super) fn use_queue(file: BorrowedFd<'_>, used: bool) -> io::Result<()> {
    let flag = if used { libc::IFF_ATTACH_QUEUE } else { libc::IFF_DETACH_QUEUE };
    let mut request = Request::with("", &flag.to_ne_bytes()[..2])?;
    request.call(file, libc::TUNSETQUEUE)
}

/// Returns the flags of an interface. In this function and in all functions below except [`set_address_v6`], `socket` may be any socket.
pub(super) fn flags(socket: BorrowedFd<'_>, name: &str) -> io::Result<u16> {
    let mut request = Request::new(name)?;
    request.call(socket, libc::SIOCGIFFLAGS)?;
    Ok(request.flags())
}

/// Sets the flags of an interface.
pub(super) fn set_flags(socket: BorrowedFd<'_>, name: &str, flags: u16) -> io::Result<()> {
    Request::with(name, &flags.to_ne_bytes())?.call(socket, libc::SIOCSIFFLAGS)
}

/// Returns the MTU of an interface in bytes.
pub(super) fn mtu(socket: BorrowedFd<'_>, name: &str) -> io::Result<i32> {
    let mut request = Request::new(name)?;
    request.call(socket, libc::SIOCGIFMTU)?;
    let [a, b, c, d, ..] = request.value;
    Ok(i32::from_ne_bytes([a, b, c, d]))
}

/// Sets the MTU of an interface in bytes.
pub(super) fn set_mtu(socket: BorrowedFd<'_>, name: &str, mtu: i32) -> io::Result<()> {
    Request::with(name, &mtu.to_ne_bytes())?.call(socket, libc::SIOCSIFMTU)
}

/// Sets the Ethernet address of an interface.
pub(super) fn set_mac(socket: BorrowedFd<'_>, name: &str, mac: [u8; 6]) -> io::Result<()> {
    // `struct sockaddr`: the family, the address.
    let value = [&libc::ARPHRD_ETHER.to_ne_bytes()[..], &mac].concat();
    Request::with(name, &value)?.call(socket, libc::SIOCSIFHWADDR)
}

/// Sets the host's address on an interface, with a network mask of `prefix` bits.
pub(super) fn set_address(socket: BorrowedFd<'_>, name: &str, ip: Ipv4Addr, prefix: u32) -> io::Result<()> {
    let mask = Ipv4Addr::from_bits(u32::MAX.checked_shl(32u32.saturating_sub(prefix)).unwrap_or(0));
    for (number, address) in [(libc::SIOCSIFADDR, ip), (libc::SIOCSIFNETMASK, mask)] {
        // `struct sockaddr_in`: the family, a port, the address.
        let family = u16::try_from(libc::AF_INET).unwrap_or_default().to_ne_bytes();
        let value = [&family[..], &[0; 2], &address.octets(), &[0; 8]].concat();
        Request::with(name, &value)?.call(socket, number)?;
    }
    Ok(())
}

/// Adds an IPv6 address of the host to an interface. `socket` must be an IPv6 socket.
pub(super) fn set_address_v6(socket: BorrowedFd<'_>, name: &str, ip: Ipv6Addr, prefix: u32) -> io::Result<()> {
    let mut index = Request::new(name)?;
    index.call(socket, libc::SIOCGIFINDEX)?;
    let [a, b, c, d, ..] = index.value;
    let address = libc::in6_ifreq {
        ifr6_addr: libc::in6_addr { s6_addr: ip.octets() },
        ifr6_prefixlen: prefix,
        ifr6_ifindex: i32::from_ne_bytes([a, b, c, d]),
    };
    // SAFETY: On an IPv6 socket, the call reads a `struct in6_ifreq`.
    result(unsafe { ioctl_with_ref(&socket.as_raw_fd(), libc::SIOCSIFADDR, &address) })
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! API client that opens a tap interface and passes its descriptor.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, IoSlice, Read};
use std::mem::MaybeUninit;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::ioctl::{Opcode, Updater, ioctl};
use rustix::net::{AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketType, sendmsg, socket};
use serde_json::Value;

// ioctls of network interfaces (`include/uapi/linux/if_tun.h`, `include/uapi/linux/sockios.h`).
const TUNSETIFF: Opcode = 0x4004_54ca;
const SIOCSIFFLAGS: Opcode = 0x8914;
const SIOCSIFADDR: Opcode = 0x8916;

/// `IFF_TAP`, `IFF_NO_PI`, `IFF_VNET_HDR`.
const TAP_FLAGS: u16 = 0x0002 | 0x1000 | 0x4000;
/// `IFF_UP`.
const UP: u16 = 1;
/// `AF_INET`.
const INET: u16 = 2;

/// `struct ifreq`.
#[repr(C)]
struct Request {
    name: [u8; 16],
    value: [u8; 24],
}

fn call<const CALL: Opcode>(file: impl AsFd, name: &str, value: &[u8]) {
    let mut request = Request { name: [0; 16], value: [0; 24] };
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    request.value[..value.len()].copy_from_slice(value);
    // SAFETY: Each call takes a pointer to a `struct ifreq`, and `Request` has the size of this structure.
    let update = unsafe { Updater::<CALL, Request>::new(&mut request) };
    // SAFETY: The call takes a pointer to a `struct ifreq`, and `Request` has the size of this structure. The kind of file does
    // not matter, because the kernel knows which calls each file supports.
    unsafe { ioctl(file, update) }.unwrap();
}

/// Creates a tap interface of the host with this address, and sets it up. The kernel removes the interface when the returned
/// file is closed.
pub(crate) fn open_tap(name: &str, address: &str) -> File {
    let file = OpenOptions::new().read(true).write(true).open("/dev/net/tun").unwrap();
    call::<TUNSETIFF>(&file, name, &TAP_FLAGS.to_ne_bytes());
    let socket = socket(AddressFamily::INET, SocketType::DGRAM, None).unwrap();
    let address: Ipv4Addr = address.parse().unwrap();
    // The network mask has 8 bits: the kernel uses the mask of the address's class (10.0.0.0/8).
    let address = [&INET.to_ne_bytes()[..], &[0; 2], &address.octets()].concat();
    call::<SIOCSIFADDR>(&socket, name, &address);
    call::<SIOCSIFFLAGS>(&socket, name, &UP.to_ne_bytes());
    file
}

/// Calls the API. Sends the request and all descriptors in one message. Returns status and body.
pub(crate) fn put_with_descriptors(api: &Path, operation: &str, body: &Value, files: &[&File]) -> (u16, String) {
    let stream = UnixStream::connect(api).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let body = body.to_string();
    let head = format!("PUT /api/v1/{operation} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n");
    let bytes = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
    let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(files.is_empty() || control.push(SendAncillaryMessage::ScmRights(&files)));
    let sent = sendmsg(&stream, &[IoSlice::new(bytes.as_bytes())], &mut control, SendFlags::empty()).unwrap();
    assert_eq!(sent, bytes.len());
    let mut reader = BufReader::new(stream);
    let (mut status, mut rest) = (String::new(), String::new());
    reader.read_line(&mut status).unwrap();
    reader.read_to_string(&mut rest).unwrap();
    let (_, body) = rest.split_once("\r\n\r\n").unwrap();
    (status.split(' ').nth(1).unwrap().parse().unwrap(), body.into())
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Servers of a vfio-user device and of a vhost-user disk, which follow the protocols. Each server serves one client after the other until
//! the test ends.

use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::thread;

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

/// Reads a whole header or payload of `len` bytes. Adds descriptors that arrive with these bytes to `files`. Returns `None` at the end of
/// the connection.
fn receive(socket: &UnixStream, len: usize, files: &mut Vec<OwnedFd>) -> Option<Vec<u8>> {
    let mut bytes = vec![0; len];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = if len == 0 {
        0
    } else {
        recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC).ok()?.bytes
    };
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            files.extend(more);
        }
    }
    (&*socket).read_exact(&mut bytes[got..]).ok()?;
    (got > 0 || len == 0).then_some(bytes)
}

fn serve(socket: &Path, mut client: impl FnMut(&UnixStream) -> Option<()> + Send + 'static) {
    let listener = UnixListener::bind(socket).unwrap();
    thread::spawn(move || {
        while let Ok((socket, _)) = listener.accept() {
            client(&socket);
        }
    });
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(*bytes[at..].first_chunk().unwrap())
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Serves a device whose BAR 0 has 64 KiB of memory and then an MSI-X table of four entries (QEMU's `docs/interop/vfio-user.rst`).
pub(crate) fn vfio_user(socket: &Path) {
    serve(socket, vfio_user_client);
}

fn vfio_user_client(socket: &UnixStream) -> Option<()> {
    const CONFIG: u32 = 7;
    const MSIX: u32 = 2;
    let mut config = vec![0; 256];
    config[..4].copy_from_slice(&0x11e8_1234u32.to_le_bytes());
    (config[6], config[0x34]) = (0x10, 0x40);
    config[0x40..0x4c].copy_from_slice(&words(&[0x3_0011, 0x1_0000, 0x1_8000]));
    let (mut memory, mut files) = (vec![0; 1 << 17], Vec::new());
    loop {
        let header = receive(socket, 16, &mut files)?;
        let payload = receive(socket, usize::try_from(word(&header, 4)).ok()?.checked_sub(16)?, &mut files)?;
        let answer = match u16::from_le_bytes([header[2], header[3]]) {
            1 => [&[0, 0, 1, 0][..], b"{\"capabilities\":{\"max_msg_fds\":8}}\0"].concat(),
            4 => words(&[16, 3, 9, 5]),
            5 => {
                let size = [(0, 1 << 17), (CONFIG, 256)].into_iter().find(|(index, _)| *index == word(&payload, 8));
                words(&[32, 3, word(&payload, 8), 0, size.map_or(0, |(_, size)| size), 0, 0, 0])
            }
            7 => words(&[16, 1, word(&payload, 8), if word(&payload, 8) == MSIX { 4 } else { 0 }]),
            command @ (9 | 10) => {
                let region = if word(&payload, 8) == CONFIG { &mut config } else { &mut memory };
                let at = usize::try_from(word(&payload, 0)).ok()?;
                let bytes = region.get_mut(at..at + usize::try_from(word(&payload, 12)).ok()?)?;
                let mut answer = payload[..16].to_vec();
                if command == 9 {
                    answer.extend_from_slice(bytes);
                } else {
                    bytes.copy_from_slice(&payload[16..]);
                }
                answer
            }
            _ => Vec::new(),
        };
        let mut message = header[..4].to_vec();
        message.extend(words(&[u32::try_from(16 + answer.len()).ok()?, 1, 0]));
        message.extend(answer);
        (&*socket).write_all(&message).ok()?;
    }
}

/// Serves a disk of 1 MiB whose sectors the guest does not read (QEMU's `docs/interop/vhost-user.rst`).
pub(crate) fn vhost_user(socket: &Path) {
    serve(socket, vhost_user_client);
}

fn vhost_user_client(socket: &UnixStream) -> Option<()> {
    let mut config = [0; 256];
    // The disk has 2048 sectors and blocks of 512 bytes.
    config[..24].copy_from_slice(&words(&[2048, 0, 1 << 20, 126, 0, 512]));
    let mut files = Vec::new();
    loop {
        let header = receive(socket, 12, &mut files)?;
        let payload = receive(socket, usize::try_from(word(&header, 8)).ok()?, &mut files)?;
        let number = |number: u64| Some(number.to_le_bytes().to_vec());
        let answer = match word(&header, 0) {
            // GET_FEATURES: version 1, protocol features.
            1 => number(1 << 32 | 1 << 30),
            // GET_PROTOCOL_FEATURES: several queues, acknowledgements, configuration, memory slots.
            15 => number(1 << 0 | 1 << 3 | 1 << 9 | 1 << 15),
            // GET_QUEUE_NUM, GET_MAX_MEM_SLOTS.
            17 => number(8),
            36 => number(32),
            // GET_VRING_BASE.
            11 => Some([&payload[..4], &[0; 4]].concat()),
            // GET_CONFIG.
            24 => Some([&payload[..12], &config[..payload.len() - 12]].concat()),
            _ if word(&header, 4) & 8 != 0 => number(0),
            _ => None,
        };
        if let Some(answer) = answer {
            let mut message = words(&[word(&header, 0), 5, u32::try_from(answer.len()).ok()?]);
            message.extend(answer);
            (&*socket).write_all(&message).ok()?;
        }
    }
}

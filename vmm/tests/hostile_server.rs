// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Servers of vfio-user devices that hold up whoever waits for them, in front of a real `carom` process whose guest turns MSI-X on and
//! off: pause, reboot and SIGTERM are done within 10 s all the same.
//!
//! Where there is no `/dev/kvm` that this process may use, these tests do nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod http;
mod tiny_guest;

use std::fs::{self, OpenOptions};
use std::io::{BufReader, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{OFlags, fcntl_setfl};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::process::{Pid, Signal, kill_process};

use http::PATIENCE;
use tiny_guest::elf;

/// How long an operation may take.
const OPERATION: Duration = Duration::from_secs(10);
/// Vectors of the device.
const VECTORS: u32 = 2048;
/// Commands of the protocol (QEMU's `docs/interop/vfio-user.rst`).
const VERSION: u16 = 1;
const GET_INFO: u16 = 4;
const GET_REGION_INFO: u16 = 5;
const GET_IRQ_INFO: u16 = 7;
const SET_IRQS: u16 = 8;
const REGION_READ: u16 = 9;
const REGION_WRITE: u16 = 10;
/// Index of configuration space, and of MSI-X.
const CONFIG: u32 = 7;
const MSIX: u32 = 2;

/// What a server does to whoever waits.
#[derive(Clone, Copy, Debug)]
struct Manner {
    /// Descriptors that it takes in one message.
    descriptors: u32,
    /// It has reads of the events that it is given block.
    blocks: bool,
    /// How long it takes to answer each SET_IRQS.
    irqs_after: Duration,
    /// How long it takes for an access to a region, once MSI-X was on.
    accesses_after: Duration,
}

/// How often it was asked for interrupts.
type Asked = Arc<AtomicU32>;

fn numbers(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

/// Configuration space of a device with MSI-X, whose table and pending bits are in BAR 0.
fn config() -> Vec<u8> {
    let mut config = vec![0; 256];
    config[..4].copy_from_slice(&0x11e8_1234u32.to_le_bytes());
    (config[6], config[0x34]) = (0x10, 0x40);
    let control = (0x11 | (VECTORS - 1) << 16).to_le_bytes();
    config[0x40..][..12].copy_from_slice(&[control, 0x1_0000u32.to_le_bytes(), 0x2_0000u32.to_le_bytes()].concat());
    config
}

fn receive(socket: &UnixStream, len: usize, files: &mut Vec<OwnedFd>) -> Option<Vec<u8>> {
    let mut bytes = vec![0; len];
    let mut done = 0;
    while done < len {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut bytes[done..])];
        let got = recvmsg(socket, &mut parts, &mut control, RecvFlags::empty()).ok()?;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = message {
                files.extend(more);
            }
        }
        if got.bytes == 0 {
            return None;
        }
        done += got.bytes;
    }
    Some(bytes)
}

fn serve(socket: &UnixStream, manner: Manner, asked: &Asked) -> Option<()> {
    let (mut config, mut kept) = (config(), Vec::new());
    loop {
        let mut files = Vec::new();
        let header = receive(socket, 16, &mut files)?;
        let half = |at: usize| u16::from_ne_bytes([header[at], header[at + 1]]);
        let size = u32::from_ne_bytes(*header[4..].first_chunk()?);
        let payload = receive(socket, usize::try_from(size).ok()?.checked_sub(16)?, &mut files)?;
        let long = |at: usize| u32::from_ne_bytes(*payload[at..].first_chunk().unwrap());
        let answer = match half(2) {
            VERSION => {
                let mut answer = vec![0, 0, 1, 0];
                answer.extend(format!("{{\"capabilities\":{{\"max_msg_fds\":{}}}}}\0", manner.descriptors).bytes());
                answer
            }
            GET_INFO => numbers(&[16, 3, 9, 5]),
            GET_REGION_INFO => {
                let size = [(0, 1 << 20), (CONFIG, 256)].into_iter().find(|(index, _)| *index == long(8));
                numbers(&[32, 3, long(8), 0, size.map_or(0, |(_, size)| size), 0, 0, 0])
            }
            GET_IRQ_INFO => numbers(&[16, 1, long(8), if long(8) == MSIX { VECTORS } else { 0 }]),
            SET_IRQS => {
                if !files.is_empty() {
                    asked.fetch_add(1, Ordering::Relaxed);
                }
                for file in files {
                    if manner.blocks {
                        fcntl_setfl(&file, OFlags::empty()).ok()?;
                    }
                    kept.push(file);
                }
                thread::sleep(manner.irqs_after);
                Vec::new()
            }
            REGION_READ | REGION_WRITE => {
                if asked.load(Ordering::Relaxed) != 0 {
                    thread::sleep(manner.accesses_after);
                }
                let (at, count) = (usize::try_from(long(0)).ok()?, usize::try_from(long(12)).ok()?);
                let mut answer = payload[..16].to_vec();
                match (half(2), long(8)) {
                    (REGION_READ, CONFIG) => answer.extend(&config[at..at + count]),
                    (REGION_READ, _) => answer.resize(16 + count, 0),
                    (_, CONFIG) => config[at..at + count].copy_from_slice(&payload[16..]),
                    _ => {}
                }
                answer
            }
            _ => Vec::new(),
        };
        let mut message = header[..4].to_vec();
        message.extend(numbers(&[u32::try_from(16 + answer.len()).ok()?, 1, 0]));
        message.extend(answer);
        (&*socket).write_all(&message).ok()?;
    }
}

/// Code that turns MSI-X of the first devices on and off for ever, by configuration ports.
fn toggle() -> Vec<u8> {
    let mut code = Vec::new();
    for value in [0x8000_0000u32, 0] {
        for slot in 1..4u32 {
            // mov dx, 0xcf8; mov eax, …; out dx, eax; mov dx, 0xcfc; mov eax, …; out dx, eax
            code.extend([0x66, 0xba, 0xf8, 0x0c, 0xb8]);
            code.extend((0x8000_0040 | slot << 11).to_le_bytes());
            code.extend([0xef, 0x66, 0xba, 0xfc, 0x0c, 0xb8]);
            code.extend(value.to_le_bytes());
            code.push(0xef);
        }
    }
    // jmp to the start
    let back = -i32::try_from(code.len() + 5).unwrap();
    code.push(0xe9);
    code.extend(back.to_le_bytes());
    code
}

/// A process that is gone at the end of the test.
struct Carom(Child);

impl Drop for Carom {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn call(dir: &Path, method: &str, name: &str) -> u16 {
    let mut stream = http::connect(&dir.join("api.sock"));
    http::send(&mut stream, method, name, None);
    http::receive(&mut BufReader::new(stream)).0
}

fn in_time(what: &str, manner: Manner, act: impl FnOnce()) {
    let start = Instant::now();
    act();
    assert!(start.elapsed() < OPERATION, "{what} took {:?}: {manner:?}", start.elapsed());
}

fn hold_up(manner: Manner) {
    if let Err(error) = OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        return eprintln!("not tested: /dev/kvm: {error}");
    }
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    fs::write(path("kernel"), elf(&toggle())).unwrap();
    let listener = UnixListener::bind(path("server")).unwrap();
    let asked = Asked::default();
    let server = {
        let asked = asked.clone();
        thread::spawn(move || {
            let (socket, _) = listener.accept().unwrap();
            serve(&socket, manner, &asked);
        })
    };
    let child = Command::new(env!("CARGO_BIN_EXE_carom"))
        .arg("--kernel")
        .arg(path("kernel"))
        .args(["--memory", "size=64M,shared=on", "--serial", "null"])
        .args(["--user-device", &format!("socket={}", path("server").display())])
        .arg("--api-socket")
        .arg(path("api.sock"))
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let mut carom = Carom(child);
    let start = Instant::now();
    while asked.load(Ordering::Relaxed) == 0 {
        assert!(start.elapsed() < PATIENCE, "the guest never turned MSI-X on");
        thread::sleep(Duration::from_millis(5));
    }
    for name in ["vm.pause", "vm.resume", "vm.reboot", "vm.reboot"] {
        in_time(name, manner, || assert_eq!(call(dir.path(), "PUT", name), 204, "{name}: {manner:?}"));
    }
    in_time("SIGTERM", manner, || {
        kill_process(Pid::from_child(&carom.0), Signal::TERM).unwrap();
        assert!(carom.0.wait().unwrap().success());
    });
    server.join().unwrap();
}

const PROMPT: Manner =
    Manner { descriptors: 32, blocks: false, irqs_after: Duration::ZERO, accesses_after: Duration::ZERO };

#[test]
fn server_that_has_events_block_holds_up_no_reset() {
    hold_up(Manner { blocks: true, ..PROMPT });
}

#[test]
fn server_that_takes_vectors_one_by_one_holds_up_nobody() {
    hold_up(Manner { descriptors: 1, irqs_after: Duration::from_millis(20), ..PROMPT });
}

#[test]
fn server_that_answers_just_in_time_holds_up_nobody() {
    hold_up(Manner { accesses_after: Duration::from_millis(4500), ..PROMPT });
}

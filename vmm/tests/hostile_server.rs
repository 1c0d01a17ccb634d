// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests a real `carom` process with hostile vfio-user servers, which delay their client or send memory accesses without end. The guest
//! makes the device a bus master and turns MSI-X on and off. Pause, reboot, shutdown and SIGTERM still finish within 10 s, and the log
//! stays small.
//!
//! Without access to `/dev/kvm`, these tests do nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod http;
#[expect(dead_code, reason = "shared by tests that read answers")]
mod program;
mod tiny_guest;

use std::fs::{self, File};
use std::io::{IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{OFlags, fcntl_setfl};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use program::{Carom, command, has_kvm, put, wait_until};
use tiny_guest::elf;

/// Maximum time of an operation on a busy machine. On an idle machine, an operation takes at most 10 s.
const OPERATION: Duration = Duration::from_secs(60);
/// Maximum bytes of the log.
const MOST_LOG: u64 = 1 << 20;
/// Number of reads that count as a flood.
const FLOOD: u32 = 5000;
/// Number of the device's vectors.
const VECTORS: u32 = 2048;
/// Commands of the protocol (QEMU's `docs/interop/vfio-user.rst`).
const VERSION: u16 = 1;
const GET_INFO: u16 = 4;
const GET_REGION_INFO: u16 = 5;
const GET_IRQ_INFO: u16 = 7;
const SET_IRQS: u16 = 8;
const REGION_READ: u16 = 9;
const REGION_WRITE: u16 = 10;
const DMA_READ: u16 = 11;
const DMA_WRITE: u16 = 12;
const RESET: u16 = 13;
/// Flags of a message: reply, reply not allowed, error.
const ANSWER: u32 = 1;
const NO_REPLY: u32 = 1 << 4;
const ERROR: u32 = 1 << 5;
/// Address of RAM that the guest does not use.
const IDLE_RAM: u64 = 0x100_0000;
/// Index of the region of configuration space, and index of the MSI-X interrupts.
const CONFIG: u32 = 7;
const MSIX: u32 = 2;

/// Behaviour of a server.
#[derive(Clone, Copy, Debug)]
struct Manner {
    /// Number of descriptors that the server accepts in one message.
    descriptors: u32,
    /// True if the server makes the received eventfds blocking.
    blocks: bool,
    /// Delay of the answer to each SET_IRQS.
    irqs_after: Duration,
    /// Delay of the reply to each access to a region, after the guest has turned MSI-X on for the first time.
    accesses_after: Duration,
    /// Requests that the server sends, after the guest has turned MSI-X on for the first time.
    asks: Asks,
}

/// Requests that a server sends by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asks {
    Nothing,
    /// The server requests reads of unmapped addresses without end, with the flag that forbids replies. The device is behind the
    /// virtio-iommu.
    Unmapped,
    /// The server requests reads of 1 MiB of RAM without end, and receives the replies in pieces of 8 KiB.
    Drained,
    /// The server writes to RAM during each reset of the device.
    WhileReset,
}

/// Observations of a server.
#[derive(Default)]
struct Seen {
    /// Number of SET_IRQS messages with eventfds over this connection.
    asked: AtomicU32,
    /// Number of refused writes and number of completed writes during resets.
    refused: AtomicU32,
    done: AtomicU32,
    /// Number of reads that the server has requested so far.
    questions: AtomicU32,
    /// True if the test ends.
    over: AtomicBool,
}

fn numbers(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

/// Returns the configuration space of a device with MSI-X, whose table and pending bits are in BAR 0.
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

/// Returns a message with one memory access.
fn access(command: u16, flags: u32, address: u64, len: u64, data: &[u8]) -> Vec<u8> {
    let size = u32::try_from(32 + data.len()).unwrap();
    let mut message = numbers(&[u32::from(command) << 16, size, flags, 0]);
    message.extend([address.to_ne_bytes(), len.to_ne_bytes()].concat());
    message.extend(data);
    message
}

/// Sends `message` until the client has disconnected.
fn flood(socket: &Mutex<UnixStream>, message: &[u8], seen: &Seen) {
    while socket.lock().unwrap().write_all(message).is_ok() {
        seen.questions.fetch_add(1, Ordering::Relaxed);
        thread::yield_now();
    }
}

/// Requests a write to RAM while the client waits for the end of a reset, and reads the reply to the request.
fn write_in_reset(socket: &UnixStream, sender: &Mutex<UnixStream>, seen: &Seen) -> Option<()> {
    sender.lock().unwrap().write_all(&access(DMA_WRITE, 0, IDLE_RAM, 8, &[0x5a; 8])).ok()?;
    let header = receive(socket, 16, &mut Vec::new())?;
    let [size, flags] = [4, 8].map(|at| u32::from_ne_bytes(*header[at..].first_chunk().unwrap()));
    receive(socket, usize::try_from(size).ok()?.checked_sub(16)?, &mut Vec::new())?;
    let count = if flags & ERROR != 0 { &seen.refused } else { &seen.done };
    count.fetch_add(1, Ordering::Relaxed);
    Some(())
}

fn serve(socket: &UnixStream, manner: Manner, seen: &Arc<Seen>) -> Option<()> {
    let (mut config, mut kept, asked) = (config(), Vec::new(), &seen.asked);
    asked.store(0, Ordering::Relaxed);
    // The lock ensures that the messages of different threads do not mix.
    let sender = Arc::new(Mutex::new(socket.try_clone().ok()?));
    let ask = |message: Vec<u8>| {
        let (sender, seen) = (sender.clone(), seen.clone());
        thread::spawn(move || flood(&sender, &message, &seen));
    };
    loop {
        let mut files = Vec::new();
        let header = receive(socket, 16, &mut files)?;
        let half = |at: usize| u16::from_ne_bytes([header[at], header[at + 1]]);
        let [size, flags] = [4, 8].map(|at| u32::from_ne_bytes(*header[at..].first_chunk().unwrap()));
        if flags & ANSWER != 0 {
            let mut left = usize::try_from(size).ok()?.checked_sub(16)?;
            while left != 0 {
                let some = left.min(8192);
                receive(socket, some, &mut files)?;
                left -= some;
                thread::sleep(Duration::from_millis(100));
            }
            continue;
        }
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
                if !files.is_empty() && asked.fetch_add(1, Ordering::Relaxed) == 0 {
                    match manner.asks {
                        Asks::Unmapped => ask(access(DMA_READ, NO_REPLY, 0xdead_0000, 4096, &[])),
                        Asks::Drained => ask(access(DMA_READ, 0, IDLE_RAM, 1 << 20, &[])),
                        _ => {}
                    }
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
            RESET if manner.asks == Asks::WhileReset => {
                write_in_reset(socket, &sender, seen)?;
                Vec::new()
            }
            _ => Vec::new(),
        };
        let mut message = header[..4].to_vec();
        message.extend(numbers(&[u32::try_from(16 + answer.len()).ok()?, 1, 0]));
        message.extend(answer);
        sender.lock().unwrap().write_all(&message).ok()?;
    }
}

/// Returns code that makes the devices in slots 1 to 3 bus masters and turns their MSI-X on and off for ever, through configuration ports.
fn toggle() -> Vec<u8> {
    let mut code = Vec::new();
    for (register, value) in [(4, 6), (0x40, 0x8000_0000u32), (0x40, 0)] {
        for slot in 1..4u32 {
            // mov dx, 0xcf8; mov eax, …; out dx, eax; mov dx, 0xcfc; mov eax, …; out dx, eax
            code.extend([0x66, 0xba, 0xf8, 0x0c, 0xb8]);
            code.extend((0x8000_0000 | register | slot << 11).to_le_bytes());
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

fn in_time(what: &str, manner: Manner, act: impl FnOnce()) {
    let start = Instant::now();
    act();
    assert!(start.elapsed() < OPERATION, "{what} took {:?}: {manner:?}", start.elapsed());
}

/// Waits until the guest has turned MSI-X on.
fn wait_for_guest(seen: &Seen, manner: Manner) {
    wait_until(&format!("the guest turns MSI-X on: {manner:?}"), || seen.asked.load(Ordering::Relaxed) != 0);
}

/// Runs a VM with a server that behaves as `manner` says. Returns the server's observations, or `None` without KVM.
fn hold_up(manner: Manner) -> Option<Arc<Seen>> {
    if !has_kvm() {
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    fs::write(path("kernel"), elf(&toggle())).unwrap();
    let listener = UnixListener::bind(path("server")).unwrap();
    let seen = Arc::new(Seen::default());
    let server = {
        let seen = seen.clone();
        // Each VM makes its own connection.
        thread::spawn(move || {
            while let Ok((socket, _)) = listener.accept()
                && !seen.over.load(Ordering::Relaxed)
            {
                serve(&socket, manner, &seen);
                let _ = socket.shutdown(Shutdown::Both);
            }
        })
    };
    let iommu = if manner.asks == Asks::Unmapped { ",iommu=on" } else { "" };
    let user_device = format!("socket={}{iommu}", path("server").display());
    let options = ["--memory", "size=64M,shared=on", "--serial", "null", "--user-device", &user_device, "--kernel"];
    let mut command = command(dir.path(), &options);
    command.arg(path("kernel")).stderr(File::create(path("log")).unwrap());
    let mut carom = Carom(command.spawn().unwrap());
    let operation = |name| in_time(name, manner, || put(dir.path(), name, None));
    wait_for_guest(&seen, manner);
    wait_until("the server sends many requests", || {
        manner.asks != Asks::Unmapped || seen.questions.load(Ordering::Relaxed) >= FLOOD
    });
    for name in ["vm.pause", "vm.resume", "vm.reboot", "vm.reboot", "vm.shutdown"] {
        operation(name);
    }
    seen.asked.store(0, Ordering::Relaxed);
    operation("vm.boot");
    wait_for_guest(&seen, manner);
    in_time("SIGTERM", manner, || {
        assert!(carom.terminate().success());
    });
    seen.over.store(true, Ordering::Relaxed);
    let _ = UnixStream::connect(path("server"));
    server.join().unwrap();
    let log = fs::metadata(path("log")).unwrap().len();
    assert!(log < MOST_LOG, "{log} bytes of log: {manner:?}");
    Some(seen)
}

const PROMPT: Manner = Manner {
    descriptors: 32,
    blocks: false,
    irqs_after: Duration::ZERO,
    accesses_after: Duration::ZERO,
    asks: Asks::Nothing,
};

#[test]
fn server_that_makes_events_block_delays_no_reset() {
    hold_up(Manner { blocks: true, ..PROMPT });
}

#[test]
fn server_that_takes_vectors_one_by_one_delays_nothing() {
    // The server accepts one vector a message. Without Carom's time limit, sending all vectors would take twice [`OPERATION`].
    hold_up(Manner { descriptors: 1, irqs_after: OPERATION / 1024, ..PROMPT });
}

#[test]
fn server_that_answers_just_in_time_delays_nothing() {
    hold_up(Manner { accesses_after: Duration::from_millis(4900), ..PROMPT });
}

#[test]
fn server_flood_of_unmapped_reads_delays_no_operation() {
    if let Some(seen) = hold_up(Manner { asks: Asks::Unmapped, ..PROMPT }) {
        let questions = seen.questions.load(Ordering::Relaxed);
        assert!(questions > FLOOD, "only {questions} reads");
    }
}

#[test]
fn server_that_reads_answers_slowly_delays_nothing() {
    if let Some(seen) = hold_up(Manner { asks: Asks::Drained, ..PROMPT }) {
        assert!(seen.questions.load(Ordering::Relaxed) > 0, "the server sent no requests");
    }
}

#[test]
fn server_that_writes_while_its_device_is_reset_is_refused() {
    if let Some(seen) = hold_up(Manner { asks: Asks::WhileReset, ..PROMPT }) {
        // Both boots and both reboots of the VM reset the device.
        let [refused, done] = [&seen.refused, &seen.done].map(|count| count.load(Ordering::Relaxed));
        assert!(refused >= 4 && done == 0, "{refused} writes refused, and {done} done");
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A driver that is written in bytes: for a fuzzer, and for replaying what one found.

use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

use super::counters::Counts;
use super::hub::Ends;
use super::spec::queue;
use super::traffic::Traffic;
use super::unix::Listener;
use crate::dma::DeviceMemory;
use crate::ram::Ram;
use crate::virtio::queue_worker::QueueTask;
use crate::virtio::{DeviceError, Driver, Interrupt};
use crate::worker::{Orders, Task};

const RAM: usize = 0x2_0000;
const SIZE: u16 = 16;
/// Bytes that are put in RAM at a time, and of the place that they go around in: the rings of all queues, and packets behind them.
const PIECE: usize = 0x400;
const PLACE: u64 = 0x3000;
/// The port of the host that somebody serves.
const SERVED: u32 = 1;
/// Rings of a queue: descriptors, available ring, used ring.
const RINGS: [u32; 3] = [0x0, 0x100, 0x180];
/// Bytes from a queue's rings to the next one's.
const STRIDE: u32 = 0x400;

/// A driver that is told nothing.
struct Silent;

impl Interrupt for Silent {
    fn queue_used(&self, _: u16) {}
    fn config_changed(&self, _: bool) {}
    fn failed(&self, _: &DeviceError) {}
}

/// Fills rings, descriptors and packets with `bytes` and has them served, piece after piece. The first byte says what the device and its
/// driver are, and a client of the host is there all the time.
///
/// # Panics
/// The device holds more than it may.
pub fn run(bytes: &[u8]) {
    let (first, bytes) = bytes.split_first().map_or((0, bytes), |(first, rest)| (*first, rest));
    let is = |bit: u8| first & 1 << bit != 0;
    let dir = Directory::new();
    let listener = Listener::bind(&dir.0.join("s")).expect("a new directory");
    let server = UnixListener::bind(dir.0.join(format!("s_{SERVED}"))).expect("a new directory");
    server.set_nonblocking(true).expect("a socket");
    let mut client = UnixStream::connect(dir.0.join("s")).expect("somebody listens");
    // Its port is one that a guest's mistake may well name.
    std::io::Write::write_all(&mut client, b"CONNECT 2\nhello").expect("it is short");
    let ram = Arc::new(Ram::from_ranges(&[(GuestAddress(0), RAM)]).expect("a small range"));
    let (memory, orders) = (DeviceMemory::all_ram(ram.clone()), Orders::none().expect("a descriptor"));
    let driver = Driver { requests: Arc::default(), memory, interrupt: Arc::new(Silent), features: 0 };
    let ends = Ends { cid: 3, listener, connections: 8, counts: Counts::default() };
    let mut traffic = Traffic::new(Arc::new(ends), driver, is(0)).expect("a descriptor");
    for index in [queue::RX, queue::TX, queue::EVENT] {
        let at = |ring: usize| Some(RINGS[ring] + STRIDE * u32::from(index));
        let mut queue = Queue::new(SIZE).expect("a power of two");
        queue.set_desc_table_address(at(0), Some(0));
        queue.set_avail_ring_address(at(1), Some(0));
        queue.set_used_ring_address(at(2), Some(0));
        queue.set_event_idx(is(1));
        queue.set_ready(true);
        traffic.put(index, queue);
    }
    let mut accepted = Vec::new();
    let mut place = 0;
    for piece in bytes.chunks(PIECE) {
        // Memory that is not there is no matter.
        let _ = ram.write_slice(piece, GuestAddress(place));
        traffic.run(&orders);
        accepted.extend(server.accept());
        if is(2) {
            accepted.clear();
        }
        place = (place + PIECE as u64) % PLACE;
    }
    assert!(traffic.hub().is_bounded());
}

/// A directory that goes when it is dropped.
struct Directory(std::path::PathBuf);

impl Directory {
    fn new() -> Self {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("carom-vsock-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).expect("a place for temporary files");
        Self(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        // What is left is for whoever tidies temporary files up.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

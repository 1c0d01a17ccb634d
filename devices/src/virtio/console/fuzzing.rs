// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A driver that is written in bytes: for a fuzzer, and for replaying what one found.

use std::io;
use std::sync::Arc;

use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

use super::device::VirtioConsole;
use super::ends::{MOST_INPUT, Size};
use super::spec::{feature, queue};
use crate::dma::DeviceMemory;
use crate::ram::Ram;
use crate::virtio::queue_worker::QueueTask;
use crate::virtio::{DeviceError, Driver, Interrupt};
use crate::worker::{Orders, Task};

const RAM: usize = 0x1_0000;
const SIZE: u16 = 16;
/// Bytes that are put in RAM at a time, and of the place that they go around in: the rings of both queues, and buffers behind them.
const PIECE: usize = 0x400;
const PLACE: u64 = 0x1000;
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

/// Fills rings, descriptors and buffers with `bytes` and has them served, piece after piece. The first byte says what the driver is, and
/// each piece is typed at the terminal too, whose size changes with it.
///
/// # Panics
/// The device holds more input than it may, or gives some twice.
pub fn run(bytes: &[u8]) {
    let (first, bytes) = bytes.split_first().map_or((0, bytes), |(first, rest)| (*first, rest));
    let ram = Arc::new(Ram::from_ranges(&[(GuestAddress(0), RAM)]).expect("a small range"));
    let (memory, orders) = (DeviceMemory::all_ram(ram.clone()), Orders::none().expect("a descriptor"));
    let driver = Driver { requests: Arc::default(), memory, interrupt: Arc::new(Silent), features: feature::SIZE };
    let console = VirtioConsole::new("fuzz", Box::new(io::sink())).expect("a descriptor");
    let mut traffic = console.traffic(driver);
    for index in [queue::RX, queue::TX] {
        let at = |ring: usize| Some(RINGS[ring] + STRIDE * u32::from(index));
        let mut queue = Queue::new(SIZE).expect("a power of two");
        queue.set_desc_table_address(at(0), Some(0));
        queue.set_avail_ring_address(at(1), Some(0));
        queue.set_used_ring_address(at(2), Some(0));
        queue.set_event_idx(first & 1 != 0);
        queue.set_ready(true);
        traffic.put(index, queue);
    }
    let (mut place, mut typed) = (0, 0);
    for piece in bytes.chunks(PIECE) {
        // Memory that is not there is no matter.
        let _ = ram.write_slice(piece, GuestAddress(place));
        typed += console.receive(piece);
        console.resize(Size { columns: piece[0].into(), rows: 25 });
        traffic.run(&orders);
        place = (place + PIECE as u64) % PLACE;
    }
    let waiting = console.waiting();
    assert!(waiting <= MOST_INPUT);
    let got = usize::try_from(console.counters().rx_bytes).expect("it was typed");
    assert!(got + waiting <= typed, "{got} came and {waiting} wait of {typed}");
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A driver that is written in bytes: for a fuzzer, and for replaying what one found.

use std::sync::Arc;

use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

use super::counters::{BalloonCounters, Counts};
use super::spec::feature;
use super::traffic::{QUEUES, Traffic};
use crate::dma::DeviceMemory;
use crate::ram::Ram;
use crate::reclaim::Reclaim;
use crate::virtio::queue_worker::QueueTask;
use crate::virtio::{DeviceError, Driver, Interrupt};
use crate::worker::{Orders, Task};

const RAM: usize = 0x4_0000;
const SIZE: u16 = 16;
/// Bytes that are put in RAM at a time, and of the place that they go around in: the rings of the queues, and buffers behind them.
const PIECE: usize = 0x400;
const PLACE: u64 = 0x2000;
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

/// Fills rings, descriptors and buffers with `bytes` and has them served, piece after piece. The first byte says what the driver is.
///
/// # Panics
/// Something went that no queue named, or some of it is in no count.
pub fn run(bytes: &[u8]) {
    let (first, bytes) = bytes.split_first().map_or((0, bytes), |(first, rest)| (*first, rest));
    let ram = Arc::new(Ram::from_ranges(&[(GuestAddress(0), RAM)]).expect("a small range"));
    let (memory, orders) = (DeviceMemory::all_ram(ram.clone()), Orders::none().expect("a descriptor"));
    let features = if first & 2 != 0 { feature::REPORTING } else { 0 };
    let driver = Driver { requests: Arc::default(), memory, interrupt: Arc::new(Silent), features };
    let page = if first & 4 != 0 { 0x1_0000 } else { 0x1000 };
    let counts = Arc::new(Counts::default());
    let mut traffic = Traffic::new(driver, Arc::new(Reclaim::new(ram.clone(), page)), counts.clone());
    for index in 0..u16::try_from(QUEUES).expect("they are few") {
        let at = |ring: usize| Some(RINGS[ring] + STRIDE * u32::from(index));
        let mut queue = Queue::new(SIZE).expect("a power of two");
        queue.set_desc_table_address(at(0), Some(0));
        queue.set_avail_ring_address(at(1), Some(0));
        queue.set_used_ring_address(at(2), Some(0));
        queue.set_event_idx(first & 1 != 0);
        queue.set_ready(true);
        traffic.put(index, queue);
    }
    let mut place = 0;
    for piece in bytes.chunks(PIECE) {
        // Memory that is not there is no matter.
        let _ = ram.write_slice(piece, GuestAddress(place));
        traffic.run(&orders);
        place = (place + PIECE as u64) % PLACE;
    }
    let BalloonCounters { inflated_bytes, reported_bytes, given_back_bytes, kept_back_bytes, refused_bytes, .. } =
        counts.read();
    assert_eq!(refused_bytes, 0);
    assert!(given_back_bytes.is_multiple_of(page));
    assert!(given_back_bytes + kept_back_bytes <= inflated_bytes + reported_bytes);
    assert!(features != 0 || reported_bytes == 0);
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A driver that is written in bytes: for a fuzzer, and for replaying what one found.

use std::fs::File;
use std::sync::Arc;

use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

use super::counters::Counts;
use super::requests::{MOST_BYTES, Requests};
use crate::dma::DeviceMemory;
use crate::ram::Ram;
use crate::virtio::{DeviceError, Driver, Interrupt};
use crate::worker::{Orders, Task};

const RAM: usize = 0x1_0000;
const SIZE: u16 = 16;
/// Descriptors, available ring, used ring.
const RINGS: [u32; 3] = [0x0, 0x200, 0x400];

/// A driver that is told nothing.
struct Silent;

impl Interrupt for Silent {
    fn queue_used(&self, _: u16) {}
    fn config_changed(&self, _: bool) {}
    fn failed(&self, _: &DeviceError) {}
}

/// Fills rings, descriptors and buffers with `bytes` and has them served: first all at once, then after each further piece.
pub fn run(bytes: &[u8]) {
    let ram = Arc::new(Ram::from_ranges(&[(GuestAddress(0), RAM)]).expect("a small range"));
    let (memory, orders) = (DeviceMemory::all_ram(ram.clone()), Orders::none().expect("a descriptor"));
    let mut queue = Queue::new(SIZE).expect("a power of two");
    queue.set_desc_table_address(Some(RINGS[0]), Some(0));
    queue.set_avail_ring_address(Some(RINGS[1]), Some(0));
    queue.set_used_ring_address(Some(RINGS[2]), Some(0));
    queue.set_event_idx(bytes.first().is_some_and(|byte| byte & 1 != 0));
    queue.set_ready(true);
    let source = File::open("/dev/zero").expect("every host has it");
    let counts = Arc::new(Counts::default());
    let driver = Driver { requests: Arc::default(), memory, interrupt: Arc::new(Silent), features: 0 };
    let mut requests = Requests::new(queue, driver, Arc::new(source), counts.clone());
    let (mut place, mut rounds) = (0, 0);
    for piece in bytes.chunks(0x500) {
        // Memory that is not there is no matter.
        let _ = ram.write_slice(piece, GuestAddress(place));
        let _ = requests.run(&orders);
        place = (place + 0x500) % 0x1000;
        rounds += 1;
    }
    let most = MOST_BYTES as u64 * 0x1_0000 * rounds;
    assert!(counts.bytes.load(std::sync::atomic::Ordering::Relaxed) <= most);
}

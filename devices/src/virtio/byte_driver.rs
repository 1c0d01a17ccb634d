// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Drivers that run without a guest, for fuzzing, benchmarks and tests.

use std::sync::Arc;

use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

use super::queue_worker::QueueTask;
use super::{DeviceError, Driver, Interrupt, VirtioPciDevice};
use crate::dma::DeviceMemory;
use crate::pci::PciDevice;
use crate::ram::Ram;
use crate::worker::Orders;

/// Implementation of [`Interrupt`] that does nothing.
pub(super) struct Silent;

impl Interrupt for Silent {
    fn queue_used(&self, _: u16) {}
    fn config_changed(&self, _: bool) {}
    fn failed(&self, _: &DeviceError) {}
}

/// Returns a driver that ignores interrupts. The device of this driver can access all of `ram`.
pub(super) fn silent_driver(ram: &Arc<Ram>, features: u64) -> Driver {
    let memory = DeviceMemory::all_ram(ram.clone());
    Driver { memory, interrupt: Arc::new(Silent), features, requests: Arc::default() }
}

/// Returns an enabled queue, with its descriptor table, available ring and used ring at `rings`.
pub(super) fn queue_at(size: u16, rings: [u64; 3]) -> Queue {
    let [descriptors, available, used] = rings.map(GuestAddress);
    let mut queue = Queue::new(size).expect("the size is a power of two");
    queue.try_set_desc_table_address(descriptors).expect("the table is aligned");
    queue.try_set_avail_ring_address(available).expect("the ring is aligned");
    queue.try_set_used_ring_address(used).expect("the ring is aligned");
    queue.set_ready(true);
    queue
}

/// `VIRTIO_F_VERSION_1`, a feature of the transport.
pub(super) const VERSION_1: u64 = 1 << 32;

/// Initializes a PCI function in the same way as a driver. The driver accepts `features` and `VERSION_1`.
///
/// Each queue is given as its number, its size, and the addresses of its descriptor table, available ring and used ring. Returns false
/// if the device rejects the features.
pub(super) fn set_up(
    function: &VirtioPciDevice,
    features: u64,
    queues: impl IntoIterator<Item = (u16, u16, [u64; 3])>,
) -> bool {
    let write = |offset, data: &[u8]| function.write_bar(0, offset, data);
    write(20, &[1]);
    write(20, &[3]);
    for (select, half) in (0u32..).zip((features | VERSION_1).to_le_bytes().chunks(4)) {
        write(8, &select.to_le_bytes());
        write(12, half);
    }
    write(20, &[11]);
    let mut status = [0];
    function.read_bar(0, 20, &mut status);
    for (queue, size, rings) in queues {
        write(22, &queue.to_le_bytes());
        write(24, &size.to_le_bytes());
        for (place, ring) in [32, 40, 48].into_iter().zip(rings) {
            write(place, &ring.to_le_bytes());
        }
        write(28, &1u16.to_le_bytes());
    }
    write(20, &[15]);
    status == [11]
}

/// Number of elements in each queue of a [`ByteDriver`].
const SIZE: u16 = 16;

/// RAM layout of a [`ByteDriver`].
#[derive(Clone, Copy)]
pub(super) struct Layout {
    /// RAM size in bytes.
    pub(super) ram: usize,
    /// Addresses of the first queue's descriptor table, available ring and used ring.
    pub(super) rings: [u64; 3],
    /// Distance in bytes between the rings of two consecutive queues.
    pub(super) stride: u64,
    /// Size in bytes of a piece of the fuzzer's input. [`ByteDriver::feed`] writes one piece at a time. After each piece, the device serves
    /// its queues.
    pub(super) piece: usize,
    /// Size in bytes of an area at address 0 that contains the rings. [`ByteDriver::feed`] writes the first piece to address 0. Each later
    /// piece starts where the previous piece ended, modulo this size.
    pub(super) written: u64,
}

impl Layout {
    /// Layout with one queue.
    pub(super) const ONE_QUEUE: Self =
        Self { ram: 0x1_0000, rings: [0, 0x200, 0x400], stride: 0, piece: 0x500, written: 0x1000 };
    /// Returns a layout with several queues, and with these values of `ram` and `written`.
    pub(super) const fn queues(ram: usize, written: u64) -> Self {
        Self { ram, rings: [0, 0x100, 0x180], stride: 0x400, piece: 0x400, written }
    }
}

/// Splits off the first byte of the fuzzer's input. This byte selects the options of the device and the driver.
pub(super) fn split_choice(bytes: &[u8]) -> (u8, &[u8]) {
    bytes.split_first().map_or((0, bytes), |(first, rest)| (*first, rest))
}

/// Driver whose rings, descriptors and buffers are bytes from a fuzzer.
pub(super) struct ByteDriver {
    pub(super) ram: Arc<Ram>,
    layout: Layout,
}

impl ByteDriver {
    pub(super) fn new(layout: Layout) -> Self {
        let ram = Ram::from_ranges(&[(GuestAddress(0), layout.ram)]).expect("the range is small");
        Self { ram: Arc::new(ram), layout }
    }

    /// Returns the driver to pass to the device.
    pub(super) fn driver(&self, features: u64) -> Driver {
        silent_driver(&self.ram, features)
    }

    /// Returns queue `index`, with or without `EVENT_IDX`.
    pub(super) fn queue(&self, index: u16, event_idx: bool) -> Queue {
        let mut queue = queue_at(SIZE, self.layout.rings.map(|ring| ring + self.layout.stride * u64::from(index)));
        queue.set_event_idx(event_idx);
        queue
    }

    /// Adds the first `count` queues to `task`.
    pub(super) fn start_queues(&self, task: &mut impl QueueTask, count: usize, event_idx: bool) {
        for index in 0..u16::try_from(count).expect("a device has few queues") {
            task.put(index, self.queue(index, event_idx));
        }
    }

    /// Writes `bytes` to RAM piece by piece, and calls `serve` after each piece to serve the queues. Returns the number of pieces.
    ///
    /// # Panics
    /// The process has no free file descriptor.
    pub(super) fn feed(&self, bytes: &[u8], mut serve: impl FnMut(&[u8], &Orders)) -> u64 {
        let orders = Orders::none().expect("a descriptor is free");
        let (mut place, mut pieces) = (0, 0);
        for piece in bytes.chunks(self.layout.piece) {
            self.ram.write_slice(piece, GuestAddress(place)).expect("each piece lies in RAM");
            serve(piece, &orders);
            place = (place + self.layout.piece as u64) % self.layout.written;
            pieces += 1;
        }
        pieces
    }
}

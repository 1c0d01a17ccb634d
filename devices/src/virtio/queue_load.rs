// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Benchmark of the queue work for one packet: the device takes a chain, walks its buffers, and returns the chain. The benchmark runs with
//! and without a record of the last requests.

use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress};

use super::byte_driver::{queue_at, silent_driver};
use super::chain::walk;
use super::queue::DeviceQueue;
use super::{Driver, LastRequests};
use crate::dma::NearMemory;
use crate::ram::Ram;

/// Number of elements of the queue. Each element is a chain of two buffers.
const SIZE: u16 = 256;
const DESCRIPTORS: u64 = 0x1_0000;
const AVAILABLE: u64 = 0x2_0000;
const USED: u64 = 0x3_0000;

/// Queue, with a driver that adds chains and a device that serves the chains.
pub struct QueueLoad {
    ram: Arc<Ram>,
    queue: DeviceQueue,
    added: u16,
}

impl QueueLoad {
    /// Returns a queue. If `with_ring` is true, the queue records its last requests.
    ///
    /// # Panics
    /// Memory cannot be allocated.
    pub fn new(with_ring: bool) -> Self {
        let ram = Ram::from_ranges(&[(GuestAddress(0), 0x10_0000)]).expect("1 MiB can be allocated");
        let ram = Arc::new(ram);
        let put = |place: u64, bytes: &[u8]| ram.write_slice(bytes, GuestAddress(place)).expect("rings are in RAM");
        let half = SIZE / 2;
        for index in 0..SIZE {
            let at = DESCRIPTORS + 16 * u64::from(index);
            put(at, &0x8_0000u64.to_le_bytes());
            put(at + 8, &1500u32.to_le_bytes());
            let (flags, next) = if index < half { (1u16, index + half) } else { (0, 0) };
            put(at + 12, &flags.to_le_bytes());
            put(at + 14, &next.to_le_bytes());
            put(AVAILABLE + 4 + 2 * u64::from(index), &(index % half).to_le_bytes());
        }
        let queue = queue_at(SIZE, [DESCRIPTORS, AVAILABLE, USED]);
        let requests = if with_ring { LastRequests::new("load", 1, 1) } else { LastRequests::default() };
        let driver = Driver { requests: Arc::new(requests), ..silent_driver(&ram, 0) };
        Self { queue: DeviceQueue::new(0, queue, &driver), ram, added: 0 }
    }

    /// Adds `chains` chains as the driver, and serves these chains as the device. `chains` is at most half of the queue size.
    ///
    /// # Panics
    /// The queue returns an error, or a chain that the driver did not add.
    pub fn turn(&mut self, chains: u16) {
        self.added = self.added.wrapping_add(chains);
        self.ram.write_slice(&self.added.to_le_bytes(), GuestAddress(AVAILABLE + 2)).expect("the ring is in RAM");
        let memory = &NearMemory::new(&self.ram);
        for _ in 0..chains {
            let chain = self.queue.next_chain(memory).expect("the rings are in RAM").expect("a chain was added");
            let head = chain.head_index();
            let bytes: usize = walk(chain, SIZE).map(|buffer| buffer.map_or(0, |buffer| buffer.len)).sum();
            assert_eq!(bytes, 3000);
            self.queue.add_used_together(memory, &[(head, 0)]).expect("the rings are in RAM");
        }
    }
}

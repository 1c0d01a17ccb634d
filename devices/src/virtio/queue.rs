// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Queue of a device. It records each request that the device takes or completes, for crash reports.

use std::num::Wrapping;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_queue::{Error, Queue, QueueOwnedT, QueueT};
use vm_memory::GuestMemory;

use super::Driver;
use super::chain::Chain;
use super::last_requests::LastRequests;
use super::used_batch;
use crate::crash::{Number, Ring};

/// Record of a queue's requests.
struct Record {
    ring: &'static Ring,
    /// Number of the request in flight for each head index.
    numbers: Box<[Number]>,
    /// Owner of `ring`. The ring buffer stays claimed while a queue holds this reference.
    _requests: Arc<LastRequests>,
}

/// Queue that a device serves.
pub(crate) struct DeviceQueue {
    queue: Queue,
    /// `None` if no ring buffer was free for the queue.
    record: Option<Record>,
}

impl DeviceQueue {
    /// Wraps `queue`, which has index `index` in the device that `driver` uses.
    pub(crate) fn new(index: u16, queue: Queue, driver: &Driver) -> Self {
        let numbers = || vec![Number::default(); queue.size().into()].into_boxed_slice();
        let record = driver.requests.of_queue(index).map(|ring| Record {
            ring,
            numbers: numbers(),
            _requests: driver.requests.clone(),
        });
        Self { queue, record }
    }

    /// Takes the next chain. Returns `None` if the queue is empty.
    ///
    /// # Errors
    /// A ring is not in the device's memory, or the driver has added more chains than the queue holds.
    #[inline]
    pub(crate) fn next_chain<M>(&mut self, memory: M) -> Result<Option<Chain<M>>, Error>
    where
        M: Clone + Deref,
        M::Target: GuestMemory + Sized,
    {
        let chain = match self.queue.iter(memory.clone())?.next() {
            Some(chain) => chain,
            None if self.queue.avail_idx(&*memory, Ordering::Acquire)? == Wrapping(self.queue.next_avail()) => {
                return Ok(None);
            }
            // The available ring is not empty. Either the driver has just added a chain, or virtio-queue cannot read the ring's element. In
            // both cases, virtio-queue returns `None`. So try a second time, and return an error if the second try finds no chain either.
            None => self.queue.iter(memory)?.next().ok_or(Error::InvalidAvailRingIndex)?,
        };
        let slot = self.record.as_mut().map(|Record { ring, numbers, .. }| {
            let head = chain.head_index();
            let (number, slot) = ring.begin_alone(head);
            if let Some(place) = numbers.get_mut(usize::from(head)) {
                *place = number;
            }
            slot
        });
        Ok(Some(Chain::new(chain, slot)))
    }

    /// Puts the last `chains` chains back, as if the device had not taken them.
    pub(crate) fn put_back(&mut self, chains: u16) {
        self.queue.set_next_avail(self.queue.next_avail().wrapping_sub(chains));
        if let Some(record) = &self.record {
            record.ring.take_back(chains);
        }
    }

    /// Returns a chain to the driver. The device has written `len` bytes to the chain.
    #[inline]
    pub(crate) fn add_used<M: GuestMemory>(&mut self, memory: &M, head: u16, len: u32) -> Result<(), Error> {
        self.queue.add_used(memory, head, len)?;
        self.keep(head, |ring, number| ring.end(number, len));
        Ok(())
    }

    /// Returns several chains to the driver. All chains become visible to the driver together.
    #[inline]
    pub(crate) fn add_used_together(&mut self, memory: &impl GuestMemory, used: &[(u16, u32)]) -> Result<(), Error> {
        used_batch::add_used(&mut self.queue, memory, used)?;
        for (head, len) in used {
            self.keep(*head, |ring, number| ring.end(number, *len));
        }
        Ok(())
    }

    /// Records the kind of the request with this head index. `crash/ring_text.rs` defines `code` and `value` for each device type. These
    /// values come from header fields of the request and contain no guest data.
    #[inline]
    pub(crate) fn note(&self, head: u16, (code, value): (u8, u64)) {
        self.keep(head, |ring, number| ring.note(number, code, value));
    }

    /// Records the status of the reply to the request with this head index.
    #[inline]
    pub(crate) fn note_status(&self, head: u16, status: u8) {
        self.keep(head, |ring, number| ring.set_status(number, status));
    }

    #[inline]
    fn keep(&self, head: u16, keep: impl FnOnce(&Ring, Number)) {
        if let Some(Record { ring, numbers, .. }) = &self.record
            && let Some(number) = numbers.get(usize::from(head))
        {
            keep(ring, *number);
        }
    }
}

impl Deref for DeviceQueue {
    type Target = Queue;

    fn deref(&self) -> &Queue {
        &self.queue
    }
}

impl DerefMut for DeviceQueue {
    fn deref_mut(&mut self) -> &mut Queue {
        &mut self.queue
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A queue as devices serve it: what is taken from it, and given back, is kept among the last requests.

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

/// What is kept of a queue's requests.
struct Record {
    ring: &'static Ring,
    /// Of the request under way with each head.
    numbers: Box<[Number]>,
    /// Holds the ring.
    _requests: Arc<LastRequests>,
}

/// A queue that a device serves.
pub(crate) struct DeviceQueue {
    queue: Queue,
    /// `None` if no ring was left.
    record: Option<Record>,
}

impl DeviceQueue {
    /// Queue `index` of the device that `driver` drives.
    pub(crate) fn new(index: u16, queue: Queue, driver: &Driver) -> Self {
        let numbers = || vec![Number::default(); queue.size().into()].into_boxed_slice();
        let record = driver.requests.of_queue(index).map(|ring| Record {
            ring,
            numbers: numbers(),
            _requests: driver.requests.clone(),
        });
        Self { queue, record }
    }

    /// Takes the next chain, if there is one.
    ///
    /// # Errors
    /// A ring is not in the device's memory, or the driver has added more chains than there is room for.
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
            // There is one. The library says that there is none where it cannot read which.
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

    /// Puts the last `chains` that were taken back, as if they had not come yet.
    pub(crate) fn put_back(&mut self, chains: u16) {
        self.queue.set_next_avail(self.queue.next_avail().wrapping_sub(chains));
        if let Some(record) = &self.record {
            record.ring.take_back(chains);
        }
    }

    /// Gives a chain back to the driver, with `len` bytes written to it.
    #[inline]
    pub(crate) fn add_used<M: GuestMemory>(&mut self, memory: &M, head: u16, len: u32) -> Result<(), Error> {
        self.queue.add_used(memory, head, len)?;
        self.keep(head, |ring, number| ring.end(number, len));
        Ok(())
    }

    /// Gives several back, which the driver sees all at once.
    #[inline]
    pub(crate) fn add_used_together(&mut self, memory: &impl GuestMemory, used: &[(u16, u32)]) -> Result<(), Error> {
        used_batch::add_used(&mut self.queue, memory, used)?;
        for (head, len) in used {
            self.keep(*head, |ring, number| ring.end(number, *len));
        }
        Ok(())
    }

    /// Keeps what the request is that has this head. `crash/ring_text.rs` says what `code` and `value` are of each type of device. They are
    /// fields of the request, nothing of what it carries.
    #[inline]
    pub(crate) fn note(&self, head: u16, (code, value): (u8, u64)) {
        self.keep(head, |ring, number| ring.note(number, code, value));
    }

    /// Keeps what the request is answered with.
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

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Task of the thread that serves the queues (virtio 1.3, section 5.5.6).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use virtio_queue::QueueT;
use vm_memory::{Address, Bytes};

use super::counters::Counts;
use super::spec::{PAGE, feature, queue};
use crate::dma::DmaView;
use crate::reclaim::Reclaim;
use crate::virtio::DeviceError;
use crate::virtio::chain::{Buffer, OUTSIDE, broken, ring_error, walk};
use crate::virtio::queue_table::{QueueService, QueueTable};
use crate::worker::{Orders, Wait};

/// Number of queues that the device offers. A driver needs only one of the queues with the indices [`queue::REPORTING`].
pub(super) const QUEUES: usize = *queue::REPORTING.end() as usize + 1;
/// Maximum number of requests that the thread serves from one queue before it serves the next queue. The thread notifies the driver after
/// these requests.
const BATCH: usize = 16;
/// Maximum size, in bytes, of the list of page numbers in one request. The limit bounds the time to serve a request.
pub(super) const MOST_NUMBERS: usize = 64 << 10;
/// Maximum number of bytes that the device returns to the host for one report of free pages. The device ignores the other reported pages,
/// which the specification allows.
const MOST_REPORTED: usize = 1 << 30;
/// Maximum number of page numbers that the device reads and processes together. Linux sends at most this many page numbers in one request.
const PIECE: usize = 256;

/// Task of the thread that serves the queues.
pub(super) struct Traffic {
    reclaim: Arc<Reclaim>,
    counts: Arc<Counts>,
    numbers: Vec<u32>,
}

impl Traffic {
    pub(super) fn new(reclaim: Arc<Reclaim>, counts: Arc<Counts>) -> Self {
        Self { reclaim, counts, numbers: Vec::with_capacity(PIECE) }
    }

    /// Serves the next request of queue `index`. Returns false if the queue has no request.
    fn step(&mut self, queues: &mut QueueTable, index: u16) -> Result<bool, DeviceError> {
        let (ring, broken) = (ring_error(index), broken(index));
        let Some((driver, queue)) = queues.get(index) else { return Ok(false) };
        let memory = &driver.memory.view();
        let size = queue.size();
        let Some(chain) = queue.next_chain(memory).map_err(&ring)? else { return Ok(false) };
        let head = chain.head_index();
        let pages = Pages { reclaim: &self.reclaim, counts: &self.counts, numbers: &mut self.numbers };
        let buffers = walk(chain, size);
        let served = if queue::REPORTING.contains(&index) {
            if driver.features & feature::REPORTING == 0 {
                return Err(broken("the driver reports free pages, but has not accepted VIRTIO_BALLOON_F_REPORTING"));
            }
            pages.report(buffers)
        } else {
            pages.number(buffers, memory, index == queue::INFLATE)
        };
        served.map_err(&broken)?;
        queue.add_used(memory, head, 0).map_err(&ring)?;
        Ok(true)
    }
}

impl QueueService for Traffic {
    const PANIC_QUEUE: u16 = queue::INFLATE;

    fn serve(&mut self, queues: &mut QueueTable, orders: &Orders) -> Result<Wait, DeviceError> {
        let all = 0..=*queue::REPORTING.end();
        for index in all.clone() {
            queues.ask(index)?;
        }
        loop {
            let mut some = false;
            for index in all.clone() {
                some |= queues.batch(index, BATCH, orders, |queues| self.step(queues, index))?;
            }
            if orders.call() || !some {
                return Ok(Wait::Doorbell);
            }
        }
    }
}

/// Fields of [`Traffic`] that are needed to serve one request.
struct Pages<'t> {
    reclaim: &'t Reclaim,
    counts: &'t Counts,
    numbers: &'t mut Vec<u32>,
}

impl Pages<'_> {
    /// Returns reported free pages to the host. Each buffer is a range of free pages. The guest does not use these pages until the device
    /// returns the buffers.
    fn report(self, buffers: impl Iterator<Item = Result<Buffer, &'static str>>) -> Result<(), &'static str> {
        let mut left = MOST_REPORTED;
        for buffer in buffers {
            let Buffer { address, len, writable } = buffer?;
            if !writable {
                return Err("a buffer of free pages is device-readable");
            }
            let len = len.min(left);
            left -= len;
            self.counts.reported_bytes.fetch_add(len as u64, Ordering::Relaxed);
            self.counts.note(self.reclaim.give_back(address.raw_value(), len as u64));
        }
        Ok(())
    }

    /// Handles a request of the driver to add pages to the balloon, or to remove pages from the balloon. The buffers contain page numbers.
    /// Numbers outside the guest's RAM are ignored.
    fn number(
        self,
        buffers: impl Iterator<Item = Result<Buffer, &'static str>>,
        memory: &DmaView<'_>,
        inflate: bool,
    ) -> Result<(), &'static str> {
        let mut all = 0;
        for buffer in buffers {
            let Buffer { address, len, writable } = buffer?;
            if writable {
                return Err("a buffer of page numbers is device-writable");
            }
            if !len.is_multiple_of(4) {
                return Err("the length of a buffer of page numbers is not a multiple of 4");
            }
            all += len;
            if all > MOST_NUMBERS {
                return Err("a request has more than 64 KiB of page numbers");
            }
            if !inflate {
                self.counts.deflated_bytes.fetch_add(len as u64 / 4 * PAGE, Ordering::Relaxed);
                continue;
            }
            for first in (0..len).step_by(4 * PIECE) {
                self.numbers.clear();
                for at in (first..len.min(first + 4 * PIECE)).step_by(4) {
                    let place = address.checked_add(at as u64).ok_or(OUTSIDE)?;
                    self.numbers.push(u32::from_le(memory.read_obj(place).map_err(|_| OUTSIDE)?));
                }
                self.counts.inflated_bytes.fetch_add(self.numbers.len() as u64 * PAGE, Ordering::Relaxed);
                // Sort the pages, so that contiguous pages are returned together even if the driver lists the pages in another order.
                self.numbers.sort_unstable();
                self.numbers.dedup();
                for run in self.numbers.chunk_by(|page, next| page + 1 == *next) {
                    let done = self.reclaim.give_back(u64::from(run[0]) * PAGE, run.len() as u64 * PAGE);
                    self.counts.note(done);
                }
            }
        }
        Ok(())
    }
}

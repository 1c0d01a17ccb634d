// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Request queue (virtio 1.3, section 5.19.6).

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use log::warn;
use virtio_queue::QueueT;
use vm_memory::{Address, Bytes, GuestAddress};

use super::counters::Counts;
use super::spec::{FLUSH, REQUEST_BYTES, REQUEST_QUEUE, status};
use crate::dma::DmaView;
use crate::throttle::Throttle;
use crate::virtio::DeviceError;
use crate::virtio::chain::{Buffer, OUTSIDE, broken, ring_error, walk};
use crate::virtio::notification::wants_interrupt;
use crate::virtio::queue_table::{QueueService, QueueTable};
use crate::worker::{Orders, Wait};

const QUEUE: u16 = REQUEST_QUEUE;
/// Maximum number of buffers of a request. Each byte of the request and its answer may have its own buffer.
const MOST_BUFFERS: usize = 2 * REQUEST_BYTES;

/// Task of the thread that serves the queue.
pub(super) struct Requests {
    /// File to flush. `None` if writes are discarded, because then there is nothing to flush.
    file: Option<Arc<File>>,
    counts: Arc<Counts>,
    throttle: Throttle,
}

/// Type of a request, and addresses of the answer's bytes. The bytes need not be contiguous.
struct Request {
    kind: u32,
    answer: [GuestAddress; REQUEST_BYTES],
}

impl Requests {
    pub(super) fn new(file: Option<Arc<File>>, counts: Arc<Counts>) -> Self {
        Self { file, counts, throttle: Throttle::default() }
    }

    /// Serves the next request. Returns false if there is no request.
    fn step(&mut self, queues: &mut QueueTable) -> Result<bool, DeviceError> {
        let Some((driver, queue)) = queues.get(QUEUE) else { return Ok(false) };
        let (ring, size) = (ring_error(QUEUE), queue.size());
        let (head, request) = {
            let memory = &driver.memory.view();
            let Some(chain) = queue.next_chain(memory).map_err(&ring)? else { return Ok(false) };
            let head = chain.head_index();
            (head, Request::read(memory, walk(chain, size)).map_err(broken(QUEUE))?)
        };
        queue.note(head, (0, request.kind.into()));
        // The view of the memory is dropped before the flush, so that an UNMAP of the guest does not wait for the disk.
        let status = if request.kind == FLUSH { self.flush() } else { status::FAILED };
        queue.note_status(head, u8::try_from(status).unwrap_or(u8::MAX));
        let memory = &driver.memory.view();
        for (address, byte) in request.answer.iter().zip(status.to_le_bytes()) {
            memory.write_obj(byte, *address).map_err(|_| broken(QUEUE)(OUTSIDE))?;
        }
        let len = u32::try_from(REQUEST_BYTES).expect("the length fits into 32 bits");
        queue.add_used(memory, head, len).map_err(&ring)?;
        if wants_interrupt(queue, memory).map_err(&ring)? {
            driver.interrupt.queue_used(QUEUE);
        }
        Ok(true)
    }

    fn flush(&mut self) -> u32 {
        let done = self.file.as_ref().map_or(Ok(()), |file| file.sync_data());
        let count = if done.is_ok() { &self.counts.flushes } else { &self.counts.errors };
        count.fetch_add(1, Ordering::Relaxed);
        let Err(error) = done else { return status::OK };
        if self.throttle.pass() {
            warn!("virtio-pmem: cannot flush the file: {error}; the guest's flush fails");
        }
        status::FAILED
    }
}

impl Request {
    fn read(
        memory: &DmaView<'_>,
        buffers: impl Iterator<Item = Result<Buffer, &'static str>>,
    ) -> Result<Self, &'static str> {
        let (mut kind, mut answer) = (Vec::new(), Vec::new());
        for (number, buffer) in buffers.enumerate() {
            let buffer = buffer?;
            if number == MOST_BUFFERS {
                return Err("a request has more than 8 buffers");
            }
            if !buffer.writable && !answer.is_empty() {
                return Err("a device-readable buffer of a request follows a device-writable one");
            }
            let place = if buffer.writable { &mut answer } else { &mut kind };
            for index in 0..buffer.len.min(REQUEST_BYTES - place.len()) {
                place.push(buffer.address.checked_add(index as u64).ok_or(OUTSIDE)?);
            }
        }
        let mut bytes = [0; REQUEST_BYTES];
        if kind.len() != bytes.len() {
            return Err("a request is shorter than its type field");
        }
        for (byte, address) in bytes.iter_mut().zip(kind) {
            *byte = memory.read_obj(address).map_err(|_| OUTSIDE)?;
        }
        let answer = answer.try_into().map_err(|_| "a request has no room for its answer")?;
        Ok(Self { kind: u32::from_le_bytes(bytes), answer })
    }
}

impl QueueService for Requests {
    const PANIC_QUEUE: u16 = QUEUE;

    fn serve(&mut self, queues: &mut QueueTable, orders: &Orders) -> Result<Wait, DeviceError> {
        queues.ask(QUEUE)?;
        while !orders.call() && self.step(queues)? {}
        Ok(Wait::Doorbell)
    }
}

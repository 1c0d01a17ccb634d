// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Request queue: takes requests from descriptor chains, lets the engine serve them, and writes the replies.

use std::mem;
use std::sync::atomic::Ordering;

use iommu_bounce::spec::{MAX_REQUEST, TAIL_SIZE};
use iommu_bounce::{Engine, MAX_REPLY, UnmapRequest};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress};

use crate::crash::{Pending, REQUESTS};
use crate::dma::NearMemory;
use crate::ram::Ram;
use crate::virtio::chain::{OUTSIDE, broken, read_request, ring_error};
use crate::virtio::notification::{ask_for_notifications, wants_interrupt};
use crate::virtio::{DeviceError, QueueState};

/// Index of the request queue.
pub(super) const REQUEST_QUEUE: u16 = 0;

/// Offset of the index in the available ring.
const AVAILABLE_INDEX: u64 = 2;

/// Information that is needed to reply to an UNMAP later.
struct UnmapReply {
    /// Head index of the request's chain.
    head: u16,
    /// Address of the tail of the reply.
    tail: GuestAddress,
    /// Entry of the request in the record of last requests.
    kept: Pending,
}

/// Request queue, with the UNMAPs that the device has taken from the queue and will serve together.
pub(super) struct RequestQueue {
    queue: Queue,
    /// Buffer for the readable part of a request. If the readable part is longer, the device ignores the remaining bytes, as the engine
    /// ignores all bytes after a request.
    request: Box<[u8]>,
    /// True if the device has asked the driver to send no notifications.
    suppressed: bool,
    /// True if the next request was interrupted. The request must be served when the device is resumed.
    interrupted: bool,
    unmaps: Vec<UnmapRequest>,
    /// Replies to `unmaps`, in the order of the queue.
    replies: Vec<UnmapReply>,
}

impl RequestQueue {
    pub(super) fn new(queue: Queue) -> Self {
        let size = queue.size().into();
        Self {
            queue,
            request: vec![0; MAX_REQUEST].into(),
            suppressed: false,
            interrupted: false,
            unmaps: Vec::with_capacity(size),
            replies: Vec::with_capacity(size),
        }
    }

    /// Serves the requests in the queue. Returns true if the driver wants an interrupt.
    ///
    /// The queue size limits the number of requests that one call serves. The call serves at least the requests that were present at the
    /// notification. So a vCPU that adds requests all the time cannot keep another vCPU in this function. For later requests, the driver
    /// sends another notification, or the polling thread finds the requests. The polling thread asks for notifications again only when the
    /// queue is empty.
    pub(super) fn serve(&mut self, memory: &Ram, engine: &mut Engine) -> Result<bool, DeviceError> {
        let memory = &NearMemory::new(memory);
        if !self.suppressed {
            ask_for_notifications(&self.queue, memory).map_err(ring_error(REQUEST_QUEUE))?;
        }
        engine.begin_batch();
        let mut request = mem::take(&mut self.request);
        let outcome = self.take(memory, engine, &mut request);
        self.request = request;
        // Serve the collected UNMAPs even if a later chain is broken.
        let flushed = self.flush(memory, engine);
        engine.end_batch();
        flushed?;
        if outcome? == 0 {
            return Ok(false);
        }
        wants_interrupt(&mut self.queue, memory).map_err(ring_error(REQUEST_QUEUE))
    }

    /// Returns true if the VMM interrupted the next request. This request is still in the queue.
    pub(super) fn is_interrupted(&self) -> bool {
        self.interrupted
    }

    /// Returns true if requests are pending.
    pub(super) fn has_requests(&self, memory: &Ram) -> Result<bool, DeviceError> {
        let index = self.queue.avail_idx(&NearMemory::new(memory), Ordering::Acquire);
        index.map(|index| index.0 != self.queue.next_avail()).map_err(ring_error(REQUEST_QUEUE))
    }

    /// Returns the position in the rings of the queue.
    pub(super) fn state(&self) -> QueueState {
        QueueState::of(&self.queue)
    }

    /// Suppresses notifications by a flag (virtio 1.3, section 2.7.7). With `EVENT_IDX`, stops asking for notifications instead.
    pub(super) fn suppress_notifications(&mut self, memory: &Ram) -> Result<(), DeviceError> {
        self.suppressed = true;
        self.queue.disable_notification(memory).map_err(ring_error(REQUEST_QUEUE))
    }

    /// Asks the driver for notifications again. Returns true if the driver has already added further requests. The caller must serve these
    /// requests, because the driver may send no notification for them.
    pub(super) fn resume_notifications(&mut self, memory: &Ram) -> Result<bool, DeviceError> {
        self.suppressed = false;
        self.queue.enable_notification(memory).map_err(ring_error(REQUEST_QUEUE))
    }

    /// Returns the address of the available ring's index (virtio 1.3, section 2.7.6).
    pub(super) fn available_index(&self) -> GuestAddress {
        GuestAddress(self.queue.avail_ring() + AVAILABLE_INDEX)
    }

    /// Returns the position in the available ring of the next request to serve.
    pub(super) fn served_index(&self) -> u16 {
        self.queue.next_avail()
    }

    /// Takes requests from the queue and serves the requests. Returns the number of requests. This function first collects UNMAPs, and
    /// serves the collected UNMAPs before the next request of another kind. The caller must serve the UNMAPs that are still collected at
    /// the end. `request` is the buffer for the readable part of a request.
    fn take<'m>(
        &mut self,
        memory: &'m NearMemory<'m>,
        engine: &mut Engine,
        request: &mut [u8],
    ) -> Result<u16, DeviceError> {
        let broken = broken(REQUEST_QUEUE);
        let ring_error = ring_error(REQUEST_QUEUE);
        let size = self.queue.size();
        let mut reply = [0; MAX_REPLY];
        self.interrupted = false;
        for taken in 0..size {
            let first = self.queue.next_avail();
            let Some(chain) = self.queue.iter(memory).map_err(&ring_error)?.next() else { return Ok(taken) };
            let chain = read_request(chain, memory, size, request).map_err(&broken)?;
            let readable = &request[..chain.readable.min(request.len())];
            let head = chain.head;
            let kept = REQUESTS.begin(readable, engine.window_version());
            let tag = u16::try_from(self.replies.len()).expect("a queue holds no more than 2^15 requests");
            if let Some(unmap) = UnmapRequest::decode(readable, chain.writable, tag)
                && let Some(tail) = chain.reply_place(TAIL_SIZE)
            {
                self.unmaps.push(unmap);
                self.replies.push(UnmapReply { head, tail, kept });
                continue;
            }
            self.flush(memory, engine)?;
            let room = chain.writable.min(MAX_REPLY);
            let used = engine.handle(readable, &mut reply[..room]).min(room);
            if engine.take_interrupted() {
                // Put the request back, as if the driver had not added the request yet.
                self.queue.set_next_avail(first);
                self.interrupted = true;
                return Ok(taken);
            }
            REQUESTS.end(kept, &reply[..used]);
            chain.write_reply(memory, &reply[..used]).map_err(&broken)?;
            let used = u32::try_from(used).expect("a reply has at most MAX_REPLY bytes");
            self.queue.add_used(memory, head, used).map_err(&ring_error)?;
        }
        Ok(size)
    }

    /// Serves the collected UNMAPs, and returns their chains to the driver in the order of the queue.
    fn flush(&mut self, memory: &NearMemory<'_>, engine: &mut Engine) -> Result<(), DeviceError> {
        if self.unmaps.is_empty() {
            return Ok(());
        }
        engine.handle_unmaps(&mut self.unmaps);
        for unmap in self.unmaps.drain(..) {
            let reply = &self.replies[usize::from(unmap.tag())];
            REQUESTS.end(reply.kept, &unmap.reply());
            memory.write_slice(&unmap.reply(), reply.tail).map_err(|_| broken(REQUEST_QUEUE)(OUTSIDE))?;
        }
        let used = u32::try_from(TAIL_SIZE).expect("a tail has 4 bytes");
        for reply in self.replies.drain(..) {
            self.queue.add_used(memory, reply.head, used).map_err(ring_error(REQUEST_QUEUE))?;
        }
        Ok(())
    }
}

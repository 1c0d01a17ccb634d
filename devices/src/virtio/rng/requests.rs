// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Request queue. A request consists of buffers for the device to fill (virtio 1.3, section 5.4.6).

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use log::warn;
use virtio_queue::QueueT;
use vm_memory::{Bytes, GuestAddress};

use super::counters::Counts;
use super::spec::REQUEST_QUEUE;
use crate::dma::DmaView;
use crate::throttle::Throttle;
use crate::virtio::DeviceError;
use crate::virtio::chain::{Chain, OUTSIDE, broken, ring_error, walk};
use crate::virtio::notification::wants_interrupt;
use crate::virtio::queue_table::{QueueService, QueueTable};
use crate::worker::{Orders, Wait};

/// Maximum number of bytes that the device returns for one request. The specification allows a device to fill only a part of the buffers
/// (section 5.4.6.1).
pub(super) const MOST_BYTES: usize = 64 << 10;
/// Delay before the next read of the source after a failed read.
const SOURCE_AGAIN: Duration = Duration::from_secs(1);

/// Task of the thread that serves the queue.
pub(super) struct Requests {
    source: Arc<File>,
    counts: Arc<Counts>,
    /// Bytes from the source that were not given to a request yet. No byte is used twice.
    random: Vec<u8>,
    /// Buffers of the current request.
    buffers: Vec<(GuestAddress, usize)>,
    throttle: Throttle,
}

/// Result of the attempt to serve one request.
enum Step {
    /// A request was served.
    Served,
    /// There is no request.
    Empty,
    /// The device has no random bytes for the request. The request asks for this number of bytes.
    Needs(usize),
}

impl Requests {
    pub(super) fn new(source: Arc<File>, counts: Arc<Counts>) -> Self {
        let (random, buffers, throttle) = (Vec::new(), Vec::new(), Throttle::default());
        Self { source, counts, random, buffers, throttle }
    }

    /// Serves the next request if the device has random bytes. Otherwise the request stays in the queue.
    fn step(&mut self, queues: &mut QueueTable) -> Result<Step, DeviceError> {
        let Some((driver, queue)) = queues.get(REQUEST_QUEUE) else { return Ok(Step::Empty) };
        let memory = &driver.memory.view();
        let ring = ring_error(REQUEST_QUEUE);
        let size = queue.size();
        let Some(chain) = queue.next_chain(memory).map_err(&ring)? else { return Ok(Step::Empty) };
        let head = chain.head_index();
        let wanted = writable_buffers(chain, size, &mut self.buffers).map_err(broken(REQUEST_QUEUE))?;
        if self.random.is_empty() {
            queue.put_back(1);
            return Ok(Step::Needs(wanted));
        }
        let mut used = 0;
        for (address, len) in &self.buffers {
            let bytes = self.random.split_off(self.random.len() - (*len).min(self.random.len()));
            memory.write_slice(&bytes, *address).map_err(|_| broken(REQUEST_QUEUE)(OUTSIDE))?;
            used += bytes.len();
        }
        let len = u32::try_from(used).expect("no request gets more than MOST_BYTES");
        queue.add_used(memory, head, len).map_err(&ring)?;
        self.counts.requests.fetch_add(1, Ordering::Relaxed);
        self.counts.bytes.fetch_add(len.into(), Ordering::Relaxed);
        if wants_interrupt(queue, memory).map_err(&ring)? {
            driver.interrupt.queue_used(REQUEST_QUEUE);
        }
        Ok(Step::Served)
    }

    /// Reads at least 1 and at most `bytes` random bytes from the source.
    fn read_source(&mut self, bytes: usize) -> io::Result<()> {
        self.random.resize(bytes, 0);
        let read = (&*self.source).read(&mut self.random);
        self.random.truncate(*read.as_ref().unwrap_or(&0));
        match read? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }
}

/// Stores the buffers of a request in `buffers`, up to a total length of [`MOST_BYTES`]. Returns the total length.
fn writable_buffers(
    chain: Chain<&DmaView<'_>>,
    queue_size: u16,
    buffers: &mut Vec<(GuestAddress, usize)>,
) -> Result<usize, &'static str> {
    buffers.clear();
    let mut room = 0;
    for buffer in walk(chain, queue_size) {
        let buffer = buffer?;
        if !buffer.writable {
            return Err("a request has a device-readable buffer");
        }
        let len = buffer.len.min(MOST_BYTES - room);
        if len != 0 {
            buffers.push((buffer.address, len));
            room += len;
        }
    }
    if room == 0 { Err("a request has only empty buffers") } else { Ok(room) }
}

impl QueueService for Requests {
    const PANIC_QUEUE: u16 = REQUEST_QUEUE;

    /// Serves requests until the queue or the source is empty.
    fn serve(&mut self, queues: &mut QueueTable, orders: &Orders) -> Result<Wait, DeviceError> {
        queues.ask(REQUEST_QUEUE)?;
        while !orders.call() {
            match self.step(queues)? {
                Step::Served => {}
                Step::Empty => break,
                Step::Needs(bytes) => match self.read_source(bytes) {
                    Ok(()) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Wait::Source),
                    Err(error) => {
                        self.counts.source_errors.fetch_add(1, Ordering::Relaxed);
                        if self.throttle.pass() {
                            warn!(
                                "virtio-rng: cannot read the source of random bytes: {error}; the guest's requests wait"
                            );
                        }
                        return Ok(Wait::Time(SOURCE_AGAIN));
                    }
                },
            }
        }
        Ok(Wait::Doorbell)
    }

    fn source(&self) -> Option<BorrowedFd<'_>> {
        Some(self.source.as_fd())
    }
}

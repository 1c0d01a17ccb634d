// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Task of the thread that serves the queues (virtio 1.3, section 5.3.6).

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use log::warn;
use virtio_queue::QueueT;
use vm_memory::{Address, Bytes, GuestAddress};

use super::ends::Ends;
use super::spec::{feature, queue};
use crate::dma::DmaView;
use crate::sync::lock;
use crate::throttle::Throttle;
use crate::virtio::chain::{Chain, OUTSIDE, broken, ring_error, walk};
use crate::virtio::queue_table::{QueueService, QueueTable};
use crate::virtio::{DeviceError, Driver};
use crate::worker::{Orders, Wait};

/// Number of queues of a device.
pub(super) const QUEUES: usize = 2;
/// Maximum number of requests that the thread serves from one queue before it serves the other queue. The thread notifies the driver after
/// these requests.
const BATCH: usize = 64;
/// Maximum number of bytes that the driver may print with one request. The limit ensures that input does not wait too long.
pub(super) const MOST_PRINTED: usize = 1 << 20;
/// Maximum number of bytes in one write to the output. A pause waits for this write. If the reader of the output is slow, the write waits
/// for at most half a second and then drops bytes. Therefore a piece must be small: a slow serial line (9600 bit/s) transmits 256 bytes in
/// about 0.3 s.
const PIECE: usize = 256;

/// Task of the thread that serves the queues.
pub(super) struct Traffic {
    ends: Arc<Ends>,
    /// Buffers of the current request.
    buffers: Vec<(GuestAddress, usize)>,
    throttle: Throttle,
}

impl Traffic {
    pub(super) fn new(ends: Arc<Ends>) -> Self {
        Self { ends, buffers: Vec::new(), throttle: Throttle::default() }
    }

    /// Notifies the driver of the terminal's size, if the size has changed.
    fn announce_size(&self, driver: &Driver) {
        if driver.features & feature::SIZE == 0 {
            return;
        }
        let mut incoming = lock(&self.ends.incoming);
        let Some(size) = incoming.news() else { return };
        incoming.announced = Some(size);
        drop(incoming);
        self.ends.counts.resizes.fetch_add(1, Ordering::Relaxed);
        driver.interrupt.config_changed(true);
    }

    /// Prints the next request. Returns false if there is no request, or if an order to pause or stop interrupted the request. An
    /// interrupted request stays in the queue.
    fn print(&mut self, queues: &mut QueueTable, orders: &Orders) -> Result<bool, DeviceError> {
        const INDEX: u16 = queue::TX;
        let Some((driver, queue)) = queues.get(INDEX) else { return Ok(false) };
        let (ring, broken) = (ring_error(INDEX), broken(INDEX));
        let head = {
            let memory = &driver.memory.view();
            let size = queue.size();
            let Some(chain) = queue.next_chain(memory).map_err(&ring)? else { return Ok(false) };
            let head = chain.head_index();
            readable_buffers(chain, size, &mut self.buffers).map_err(&broken)?;
            head
        };
        let whole = self.print_buffers(driver, orders).map_err(broken)?;
        if whole {
            self.ends.printed.store(0, Ordering::Relaxed);
            queue.add_used(&driver.memory.view(), head, 0).map_err(ring)?;
        } else {
            queue.put_back(1);
        }
        Ok(whole)
    }

    /// Prints the buffers, except the bytes that were already printed before a pause. Returns false if an order to pause or stop arrived
    /// before the end.
    ///
    /// # Errors
    /// A buffer is outside the memory that the device can access.
    fn print_buffers(&self, driver: &Driver, orders: &Orders) -> Result<bool, &'static str> {
        let mut scratch = [0; PIECE];
        let mut before = self.ends.printed.load(Ordering::Relaxed);
        for (address, len) in &self.buffers {
            let mut done = before.min(*len);
            before -= done;
            while done < *len {
                if orders.call() {
                    return Ok(false);
                }
                let piece = &mut scratch[..PIECE.min(len - done)];
                let address = address.checked_add(done as u64).ok_or(OUTSIDE)?;
                // The view of the memory is dropped after this read, so that an UNMAP does not wait for the output.
                driver.memory.view().read_slice(piece, address).map_err(|_| OUTSIDE)?;
                if let Err(error) = lock(&self.ends.output).write_all(piece)
                    && self.throttle.pass()
                {
                    warn!("virtio-console: cannot write the guest's output, so the output is lost: {error}");
                }
                done += piece.len();
                self.ends.printed.fetch_add(piece.len(), Ordering::Relaxed);
                self.ends.counts.tx_bytes.fetch_add(piece.len() as u64, Ordering::Relaxed);
            }
        }
        Ok(true)
    }

    /// Fills the next input buffer. Returns false if there is no input or no buffer.
    fn give_input(&self, queues: &mut QueueTable) -> Result<bool, DeviceError> {
        const INDEX: u16 = queue::RX;
        let Some((driver, queue)) = queues.get(INDEX) else { return Ok(false) };
        let mut incoming = lock(&self.ends.incoming);
        if incoming.input.is_empty() {
            return Ok(false);
        }
        let (ring, broken) = (ring_error(INDEX), broken(INDEX));
        let memory = &driver.memory.view();
        let size = queue.size();
        let Some(chain) = queue.next_chain(memory).map_err(&ring)? else { return Ok(false) };
        let head = chain.head_index();
        let mut used = 0;
        for buffer in walk(chain, size) {
            let buffer = buffer.map_err(&broken)?;
            if !buffer.writable {
                return Err(broken("an input buffer is device-readable"));
            }
            let len = incoming.input.len().min(buffer.len);
            if len != 0 {
                let bytes = &incoming.input.make_contiguous()[..len];
                memory.write_slice(bytes, buffer.address).map_err(|_| broken(OUTSIDE))?;
                incoming.input.drain(..len);
                used += u32::try_from(len).expect("at most MOST_INPUT bytes wait");
            }
            if incoming.input.is_empty() {
                break;
            }
        }
        if used == 0 {
            return Err(broken("an input buffer has length 0"));
        }
        queue.add_used(memory, head, used).map_err(&ring)?;
        self.ends.counts.rx_bytes.fetch_add(used.into(), Ordering::Relaxed);
        Ok(true)
    }
}

/// Stores the buffers of a print request in `buffers`.
///
/// # Errors
/// The request breaks a rule. The error names this rule.
fn readable_buffers(
    chain: Chain<&DmaView<'_>>,
    queue_size: u16,
    buffers: &mut Vec<(GuestAddress, usize)>,
) -> Result<(), &'static str> {
    buffers.clear();
    let mut all = 0;
    for buffer in walk(chain, queue_size) {
        let buffer = buffer?;
        if buffer.writable {
            return Err("an output buffer is device-writable");
        }
        all += buffer.len;
        if all > MOST_PRINTED {
            return Err("an output request is longer than 1 MiB");
        }
        buffers.push((buffer.address, buffer.len));
    }
    Ok(())
}

impl QueueService for Traffic {
    const PANIC_QUEUE: u16 = queue::TX;

    /// Prints all output that the driver has added, and fills input buffers with all waiting input.
    fn serve(&mut self, queues: &mut QueueTable, orders: &Orders) -> Result<Wait, DeviceError> {
        self.announce_size(queues.driver());
        queues.ask(queue::TX)?;
        queues.ask(queue::RX)?;
        loop {
            let printed = queues.batch(queue::TX, BATCH, orders, |queues| self.print(queues, orders))?;
            let typed = queues.batch(queue::RX, BATCH, orders, |queues| self.give_input(queues))?;
            if orders.call() || !(printed || typed) {
                return Ok(Wait::Doorbell);
            }
        }
    }
}

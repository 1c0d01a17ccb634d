// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The work of the thread that serves the queues (virtio 1.3, section 5.3.6).

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use log::warn;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Address, Bytes};

use super::ends::Ends;
use super::spec::{feature, queue};
use crate::sync::lock;
use crate::throttle::Throttle;
use crate::virtio::chain::{OUTSIDE, broken, ring_error, walk};
use crate::virtio::notification::{ask_for_notifications, wants_interrupt};
use crate::virtio::queue::DeviceQueue;
use crate::virtio::{DeviceError, Driver, QueueState};
use crate::worker::{Orders, Task, Wait};

/// Queues of a device.
pub(super) const QUEUES: usize = 2;
/// Buffers of one queue before the other has its turn, and after which the driver is told.
const BATCH: usize = 64;
/// Most bytes that the driver may print with one request, so that none takes long.
pub(super) const MOST_PRINTED: usize = 1 << 20;
/// Bytes that are copied at a time.
const PIECE: usize = 4 << 10;

/// The work of the thread that serves the queues.
pub(super) struct Traffic {
    driver: Driver,
    ends: Arc<Ends>,
    queues: [Option<DeviceQueue>; QUEUES],
    scratch: Vec<u8>,
    failed: bool,
    throttle: Throttle,
}

impl Traffic {
    pub(super) fn new(ends: Arc<Ends>, driver: Driver) -> Self {
        let (queues, scratch) = ([None, None], vec![0; PIECE]);
        Self { driver, ends, queues, scratch, failed: false, throttle: Throttle::default() }
    }

    /// Serves a queue from now on.
    pub(super) fn put(&mut self, index: u16, queue: Queue) {
        if let Some(place) = self.queues.get_mut(usize::from(index)) {
            *place = Some(DeviceQueue::new(index, queue, &self.driver));
        }
    }

    /// Serves a queue no more; returns how far it was.
    pub(super) fn take(&mut self, index: u16) -> Option<QueueState> {
        let queue = self.queues.get_mut(usize::from(index))?.take()?;
        Some(QueueState::of(&queue))
    }

    /// How far a queue is served.
    pub(super) fn state(&self, index: u16) -> Option<QueueState> {
        self.queues.get(usize::from(index))?.as_ref().map(|queue| QueueState::of(queue))
    }

    /// Whether it has no queue.
    pub(super) fn is_idle(&self) -> bool {
        self.queues.iter().all(Option::is_none)
    }

    /// Carries all that there is, either way.
    fn serve(&mut self, orders: &Orders) -> Result<(), DeviceError> {
        self.tell_of_size();
        self.ask(queue::TX)?;
        self.ask(queue::RX)?;
        loop {
            let printed = self.batch(queue::TX, Self::print)?;
            let typed = self.batch(queue::RX, Self::give_input)?;
            if orders.call() || !(printed || typed) {
                return Ok(());
            }
        }
    }

    /// Tells the driver of the size that the terminal has now.
    fn tell_of_size(&mut self) {
        if self.driver.features & feature::SIZE == 0 {
            return;
        }
        let mut incoming = lock(&self.ends.incoming);
        let Some(size) = incoming.news() else { return };
        incoming.told = Some(size);
        drop(incoming);
        self.ends.counts.resizes.fetch_add(1, Ordering::Relaxed);
        self.driver.interrupt.config_changed(true);
    }

    /// Has the driver tell of buffers that it adds from now on.
    fn ask(&self, index: u16) -> Result<(), DeviceError> {
        let Some(queue) = &self.queues[usize::from(index)] else { return Ok(()) };
        ask_for_notifications(queue, &self.driver.memory.view()).map_err(ring_error(index))
    }

    /// Takes `step` for some buffers of a queue, and tells the driver of them; `true` if there were any.
    fn batch(
        &mut self,
        index: u16,
        step: impl Fn(&mut Self) -> Result<bool, DeviceError>,
    ) -> Result<bool, DeviceError> {
        let mut some = false;
        for _ in 0..BATCH {
            if !step(self)? {
                break;
            }
            some = true;
        }
        let Some(queue) = self.queues[usize::from(index)].as_mut().filter(|_| some) else { return Ok(some) };
        if wants_interrupt(queue, &self.driver.memory.view()).map_err(ring_error(index))? {
            self.driver.interrupt.queue_used(index);
        }
        Ok(some)
    }

    /// Prints what one request has; `false` if there is none.
    fn print(&mut self) -> Result<bool, DeviceError> {
        const INDEX: u16 = queue::TX;
        let Some(queue) = &mut self.queues[usize::from(INDEX)] else { return Ok(false) };
        let (ring, broken) = (ring_error(INDEX), broken(INDEX));
        let memory = &self.driver.memory.view();
        let size = queue.size();
        let Some(chain) = queue.next_chain(memory).map_err(&ring)? else { return Ok(false) };
        let head = chain.head_index();
        let mut all = 0;
        for buffer in walk(chain, size) {
            let buffer = buffer.map_err(&broken)?;
            if buffer.writable {
                return Err(broken("what is to be printed is in a device-writable buffer"));
            }
            all += buffer.len;
            if all > MOST_PRINTED {
                return Err(broken("more is to be printed by one request than the device takes"));
            }
            let mut done = 0;
            while done < buffer.len {
                let piece = &mut self.scratch[..PIECE.min(buffer.len - done)];
                let address = buffer.address.checked_add(done as u64).ok_or(broken(OUTSIDE))?;
                memory.read_slice(piece, address).map_err(|_| broken(OUTSIDE))?;
                if let Err(error) = lock(&self.ends.output).write_all(piece)
                    && self.throttle.pass()
                {
                    warn!("virtio-console: output is lost: {error}");
                }
                done += piece.len();
            }
        }
        queue.add_used(memory, head, 0).map_err(&ring)?;
        self.ends.counts.tx_bytes.fetch_add(all as u64, Ordering::Relaxed);
        Ok(true)
    }

    /// Fills a buffer with input; `false` if there is none of either.
    fn give_input(&mut self) -> Result<bool, DeviceError> {
        const INDEX: u16 = queue::RX;
        let Some(queue) = &mut self.queues[usize::from(INDEX)] else { return Ok(false) };
        let mut incoming = lock(&self.ends.incoming);
        if incoming.input.is_empty() {
            return Ok(false);
        }
        let (ring, broken) = (ring_error(INDEX), broken(INDEX));
        let memory = &self.driver.memory.view();
        let size = queue.size();
        let Some(chain) = queue.next_chain(memory).map_err(&ring)? else { return Ok(false) };
        let head = chain.head_index();
        let mut used = 0;
        for buffer in walk(chain, size) {
            let buffer = buffer.map_err(&broken)?;
            if !buffer.writable {
                return Err(broken("a buffer for input is device-readable"));
            }
            let len = incoming.input.len().min(buffer.len);
            if len != 0 {
                let bytes = &incoming.input.make_contiguous()[..len];
                memory.write_slice(bytes, buffer.address).map_err(|_| broken(OUTSIDE))?;
                incoming.input.drain(..len);
                used += u32::try_from(len).expect("no more than MOST_INPUT waits");
            }
            if incoming.input.is_empty() {
                break;
            }
        }
        if used == 0 {
            return Err(broken("a buffer for input has no room for a byte"));
        }
        queue.add_used(memory, head, used).map_err(&ring)?;
        self.ends.counts.rx_bytes.fetch_add(used.into(), Ordering::Relaxed);
        Ok(true)
    }
}

impl Task for Traffic {
    fn run(&mut self, orders: &Orders) -> Wait {
        if !self.failed
            && let Err(error) = self.serve(orders)
        {
            self.failed = true;
            self.driver.interrupt.failed(&error);
        }
        Wait::Doorbell
    }

    fn panicked(&self) {
        self.driver.interrupt.failed(&DeviceError::Panicked { queue: queue::TX });
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Transmit queue: packets from the guest for the host (virtio 1.4, section 5.1.6.2).

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use virtio_queue::{Queue, QueueT};

use super::buffers::{Buffers, Direction, collect, read};
use super::link::Link;
use super::spec::{HEADER_BYTES, MAX_PACKET, MIN_FRAME};
use super::turn::{Rest, Turn, notify_driver};
use crate::counters::count;
use crate::throttle::Throttle;
use crate::virtio::chain::{broken, ring_error};
use crate::virtio::notification::more_came;
use crate::virtio::queue::DeviceQueue;
use crate::virtio::{DeviceError, Driver, QueueState};
use crate::worker::{Orders, Wait};

/// Maximum number of packets in one turn. The driver is notified at the end of each turn.
const MOST: u32 = 64;

/// Transmit queue.
pub(super) struct Transmit {
    pub(super) index: u16,
    queue: DeviceQueue,
    driver: Driver,
    link: Arc<Link>,
    /// Current packet.
    packet: Vec<u8>,
    /// Buffers of the current packet.
    buffers: Buffers,
    /// Current delay, after the rate limit was reached.
    rest: Rest,
    throttle: Throttle,
}

/// Result of the attempt to send one packet to the host.
enum Step {
    /// A packet was sent to the host or dropped.
    Done,
    /// There is no packet.
    NoPacket,
    /// The rate limit delays the next packet for this time.
    Held(Duration),
}

impl Transmit {
    pub(super) fn new(index: u16, queue: Queue, driver: Driver, link: Arc<Link>) -> Self {
        let queue = DeviceQueue::new(index, queue, &driver);
        let packet = vec![0; HEADER_BYTES + MAX_PACKET];
        let (buffers, rest, throttle) = (Vec::new(), Rest::default(), Throttle::default());
        Self { index, queue, driver, link, packet, buffers, rest, throttle }
    }

    /// Returns the queue's state.
    pub(super) fn state(&self) -> QueueState {
        QueueState::of(&self.queue)
    }

    /// Sends waiting packets to the host, at most [`MOST`] packets. Asks the driver for notifications only when the queue is empty.
    pub(super) fn turn(&mut self, orders: &Orders) -> Result<Turn, DeviceError> {
        if let Some(left) = self.rest.left() {
            return Ok(Turn::Wait(Wait::Time(left)));
        }
        let (since, mut sent) = (self.queue.next_used(), 0);
        let turn = loop {
            if sent == MOST || orders.call() {
                break Turn::More;
            }
            match self.send()? {
                Step::Done => sent += 1,
                Step::NoPacket if self.more_came()? => {}
                Step::NoPacket => break Turn::Wait(Wait::Doorbell),
                Step::Held(time) => break self.rest.begin(time),
            }
        };
        notify_driver(&self.queue, &self.driver, self.index, since)?;
        Ok(turn)
    }

    fn more_came(&self) -> Result<bool, DeviceError> {
        more_came(&self.queue, &self.driver.memory.view()).map_err(ring_error(self.index))
    }

    /// Sends the next packet. If the rate limit delays the packet, the packet stays in the queue as if the driver had not added it yet.
    fn send(&mut self) -> Result<Step, DeviceError> {
        let ring = ring_error(self.index);
        let (head, bytes, whole) = {
            let memory = &self.driver.memory.view();
            let size = self.queue.size();
            let Some(chain) = self.queue.next_chain(memory).map_err(&ring)? else { return Ok(Step::NoPacket) };
            let head = chain.head_index();
            self.buffers.clear();
            let whole = collect(chain, size, Direction::Readable, &mut self.buffers).map_err(broken(self.index))?;
            let limiter = self.link.transmit_limiter.as_ref();
            if let Err(time) = self.link.pass(limiter, whole.saturating_sub(HEADER_BYTES)) {
                self.queue.put_back(1);
                return Ok(Step::Held(time));
            }
            (head, read(memory, &self.buffers, &mut self.packet).map_err(broken(self.index))?, whole)
        };
        // The view of guest memory is already dropped here. So a slow write to the host does not block an unmap of guest memory.
        let counts = &self.link.counts;
        if whole > bytes || bytes < HEADER_BYTES + MIN_FRAME {
            count(&counts.tx_dropped, 1);
        } else {
            // A write sends the whole packet or fails.
            match self.link.file(self.index).write_all(&self.packet[..bytes]) {
                Ok(()) => {
                    count(&counts.tx_frames, 1);
                    count(&counts.tx_bytes, (bytes - HEADER_BYTES) as u64);
                }
                Err(error) => {
                    count(&counts.tx_dropped, 1);
                    self.link.complain(
                        &self.throttle,
                        "cannot send a packet of the guest to the host interface",
                        &error,
                    );
                }
            }
        }
        self.queue.add_used_together(&self.driver.memory.view(), &[(head, 0)]).map_err(&ring)?;
        Ok(Step::Done)
    }
}

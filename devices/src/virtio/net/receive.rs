// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Receive queue: packets from the host for the guest (virtio 1.4, section 5.1.6.3).

use std::io::{self, Read};
use std::num::Wrapping;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use virtio_queue::{Queue, QueueT};

use super::buffers::{Buffers, Direction, collect, write};
use super::link::Link;
use super::spec::{HEADER_BYTES, MAX_PACKET, MRG_RXBUF, NUM_BUFFERS};
use super::turn::{Rest, Turn, notify_driver};
use crate::counters::count;
use crate::throttle::Throttle;
use crate::virtio::chain::{broken, ring_error};
use crate::virtio::notification::ask_for_notifications;
use crate::virtio::queue::DeviceQueue;
use crate::virtio::{DeviceError, Driver, QueueState};
use crate::worker::{Orders, Wait};

/// Maximum number of packets in one turn. The driver is notified at the end of each turn.
const MOST: u32 = 64;
/// Delay between a failed read from the host interface and the next read.
const AGAIN: Duration = Duration::from_secs(1);

/// Receive queue.
pub(super) struct Receive {
    pub(super) index: u16,
    queue: DeviceQueue,
    driver: Driver,
    link: Arc<Link>,
    /// Current packet with its header.
    packet: Vec<u8>,
    /// Size in bytes of the current packet with its header. 0 if there is no current packet.
    len: usize,
    /// True if the rate limit has let the current packet pass.
    passed: bool,
    /// Buffers for the current packet.
    buffers: Buffers,
    /// Chains that contain `buffers`: head index, and number of bytes to write.
    used: Vec<(u16, u32)>,
    /// Driver's index in the available ring at the last check.
    seen: Wrapping<u16>,
    /// Current delay, after the rate limit was reached or a read from the host interface failed.
    rest: Rest,
    throttle: Throttle,
}

/// Result of the attempt to pass one packet to the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// A packet was written to the driver's buffers, or was dropped.
    Done,
    /// There is no packet.
    NoPacket,
    /// The driver has not added enough buffers for the packet.
    NoRoom,
    /// The rate limit delays the packet for this time.
    Held(Duration),
}

impl Receive {
    pub(super) fn new(index: u16, queue: Queue, driver: Driver, link: Arc<Link>) -> Self {
        Self {
            index,
            queue: DeviceQueue::new(index, queue, &driver),
            driver,
            link,
            packet: vec![0; HEADER_BYTES + MAX_PACKET],
            len: 0,
            passed: false,
            buffers: Vec::new(),
            used: Vec::new(),
            seen: Wrapping(0),
            rest: Rest::default(),
            throttle: Throttle::default(),
        }
    }

    /// Returns the queue's state.
    pub(super) fn state(&self) -> QueueState {
        QueueState::of(&self.queue)
    }

    /// Returns the file descriptor that becomes readable when there are packets.
    pub(super) fn source(&self) -> BorrowedFd<'_> {
        self.link.file(self.index).as_fd()
    }

    /// Writes waiting packets to the driver's buffers, at most [`MOST`] packets. Stops earlier if the driver has no room for another
    /// packet.
    pub(super) fn turn(&mut self, orders: &Orders) -> Result<Turn, DeviceError> {
        if let Some(left) = self.rest.left() {
            return Ok(Turn::Wait(Wait::Time(left)));
        }
        if self.link.is_gone() {
            return Ok(Turn::Wait(Wait::Doorbell));
        }
        let since = self.queue.next_used();
        let mut received = 0;
        let turn = loop {
            if received == MOST || orders.call() {
                break Turn::More;
            }
            match self.step() {
                Ok(Step::Done) => received += 1,
                Ok(Step::NoPacket) => break Turn::Wait(Wait::Source),
                // During the delay, further packets wait in the host interface.
                Ok(Step::Held(time)) => break self.rest.begin(time),
                Ok(Step::NoRoom) if self.has_room_now()? => {}
                Ok(Step::NoRoom) => break Turn::Wait(Wait::Doorbell),
                Err(Failure::Driver(error)) => return Err(error),
                Err(Failure::Host(error)) => {
                    count(&self.link.counts.host_errors, 1);
                    self.link.complain(&self.throttle, "cannot read from the host interface", &error);
                    break if self.link.is_gone() { Turn::Wait(Wait::Doorbell) } else { self.rest.begin(AGAIN) };
                }
            }
        };
        notify_driver(&self.queue, &self.driver, self.index, since)?;
        Ok(turn)
    }

    /// Asks the driver to notify the device of new buffers. Returns true if the driver has added buffers since the last check.
    fn has_room_now(&mut self) -> Result<bool, DeviceError> {
        let before = self.seen;
        ask_for_notifications(&self.queue, &self.driver.memory.view()).map_err(ring_error(self.index))?;
        self.look()?;
        Ok(self.seen != before)
    }

    /// Reads the driver's index in the available ring.
    fn look(&mut self) -> Result<(), DeviceError> {
        let available = self.queue.avail_idx(&self.driver.memory.view(), Ordering::Acquire);
        self.seen = available.map_err(ring_error(self.index))?;
        Ok(())
    }

    /// Writes one packet to the driver's buffers.
    fn step(&mut self) -> Result<Step, Failure> {
        self.look()?;
        if self.len == 0 {
            // While the driver has no room, packets wait in the queue of the host interface. If this queue is full, the host drops packets.
            if self.seen == Wrapping(self.queue.next_avail()) {
                return Ok(Step::NoRoom);
            }
            match self.link.file(self.index).read(&mut self.packet) {
                Ok(len) if len > HEADER_BYTES => self.len = len,
                Ok(_) => return Err(Failure::Host(io::ErrorKind::UnexpectedEof.into())),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Step::NoPacket),
                Err(error) => return Err(Failure::Host(error)),
            }
        }
        if !self.passed {
            let limiter = self.link.receive_limiter.as_ref();
            if let Err(time) = self.link.pass(limiter, self.len - HEADER_BYTES) {
                return Ok(Step::Held(time));
            }
            self.passed = true;
        }
        let given = self.give()?;
        if given != Step::NoRoom {
            (self.len, self.passed) = (0, false);
        }
        Ok(given)
    }

    /// Writes the current packet to the driver's buffers. Drops the packet if the driver's buffers can never hold the packet.
    fn give(&mut self) -> Result<Step, DeviceError> {
        let (ring, rule) = (ring_error(self.index), broken(self.index));
        let memory = &self.driver.memory.view();
        let (first, size) = (self.queue.next_avail(), self.queue.size());
        let merges = self.driver.features & MRG_RXBUF != 0;
        self.buffers.clear();
        self.used.clear();
        let mut room = 0;
        while room < self.len {
            let Some(chain) = self.queue.next_chain(memory).map_err(&ring)? else {
                self.queue.put_back(self.queue.next_avail().wrapping_sub(first));
                // If the queue is full of buffers, the driver cannot add more buffers. So a packet that is larger than the total size of
                // these buffers can never fit.
                let all = self.used.len() >= usize::from(size);
                return Ok(if all { self.lose() } else { Step::NoRoom });
            };
            let head = chain.head_index();
            let bytes = collect(chain, size, Direction::Writable, &mut self.buffers).map_err(&rule)?;
            if !merges && bytes < self.len {
                // Return the buffers to the queue, for the next packet.
                self.queue.put_back(self.queue.next_avail().wrapping_sub(first));
                return Ok(self.lose());
            }
            let part = bytes.min(self.len - room);
            // The conversion cannot fail, because `part` is at most the length of the packet.
            self.used.push((head, u32::try_from(part).map_err(|_| rule("a buffer is too long"))?));
            room += part;
            if self.used.len() > usize::from(size) {
                return Err(rule("the driver has added more buffers than the queue holds"));
            }
        }
        let buffers = u16::try_from(self.used.len()).map_err(|_| rule("a packet needs too many buffers"))?;
        self.packet[NUM_BUFFERS..HEADER_BYTES].copy_from_slice(&buffers.to_le_bytes());
        write(memory, &self.buffers, &self.packet[..self.len]).map_err(&rule)?;
        self.queue.add_used_together(memory, &self.used).map_err(&ring)?;
        count(&self.link.counts.rx_frames, 1);
        count(&self.link.counts.rx_bytes, (self.len - HEADER_BYTES) as u64);
        Ok(Step::Done)
    }

    /// Counts the current packet as dropped, because the packet is too large for the driver's buffers.
    fn lose(&self) -> Step {
        count(&self.link.counts.rx_dropped, 1);
        Step::Done
    }
}

/// Reason why a packet cannot be passed to the driver.
enum Failure {
    /// The driver broke a rule.
    Driver(DeviceError),
    /// The host interface failed.
    Host(io::Error),
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Self {
        Self::Driver(error)
    }
}

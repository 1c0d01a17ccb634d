// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Task of the thread that serves the queues (virtio 1.4, section 5.10.6).

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use virtio_queue::QueueT;

use super::connection::MOST_DATA;
use super::credit::BUF_ALLOC;
use super::hub::{Ends, Hub};
use super::packet::{Buffers, Header};
use super::spec::{EVENT, EVENT_TRANSPORT_RESET, HEADER, queue};
use crate::virtio::DeviceError;
use crate::virtio::chain::{broken, ring_error};
use crate::virtio::queue_table::{QueueService, QueueTable};
use crate::worker::{Orders, Wait};

/// Number of queues of a device.
pub(super) const QUEUES: usize = 3;
/// Maximum number of packets that the thread moves in one direction before it serves the other direction. The thread interrupts the driver
/// after these packets.
const BATCH: usize = 64;

/// Result of the attempt to move one packet between a queue and the hub.
enum Step {
    Done,
    /// The queue has no buffer.
    Empty,
    /// There is no packet to put into the queue.
    Idle,
}

/// Task of the thread that serves the queues.
pub(super) struct Traffic {
    pub(super) hub: Hub,
    /// True if the device must notify the guest that its connections were lost. The device accepts no client before this notification,
    /// because the guest could mistake the client's connection for a lost connection.
    reset_due: bool,
    buffers: Buffers,
    /// Data of a packet.
    scratch: Vec<u8>,
}

impl Traffic {
    /// # Errors
    /// The process has no free file descriptor.
    pub(super) fn new(ends: Arc<Ends>, reset_due: bool) -> io::Result<Self> {
        let mut hub = Hub::new(ends)?;
        if reset_due {
            hub.forget_ports();
        }
        Ok(Self { hub, reset_due, buffers: Buffers::default(), scratch: vec![0; BUF_ALLOC.max(MOST_DATA)] })
    }

    /// Handles packets of the guest. Returns true if at least one packet was handled.
    fn serve_tx(&mut self, queues: &mut QueueTable) -> Result<bool, DeviceError> {
        let mut some = false;
        for _ in 0..BATCH {
            if self.hub.is_full() || !matches!(self.take_packet(queues)?, Step::Done) {
                break;
            }
            some = true;
        }
        if some {
            queues.interrupt(queue::TX)?;
        }
        Ok(some)
    }

    fn take_packet(&mut self, queues: &mut QueueTable) -> Result<Step, DeviceError> {
        const INDEX: u16 = queue::TX;
        let Some((driver, queue)) = queues.get(INDEX) else { return Ok(Step::Empty) };
        let (ring, broken) = (ring_error(INDEX), broken(INDEX));
        let memory = &driver.memory.view();
        let size = queue.size();
        let Some(chain) = queue.next_chain(memory).map_err(&ring)? else { return Ok(Step::Empty) };
        let head = chain.head_index();
        let all = self.buffers.gather(chain, size, false).map_err(&broken)?;
        let mut header = [0; HEADER];
        if all < HEADER {
            return Err(broken("a packet is shorter than its header"));
        }
        self.buffers.read(memory, 0, &mut header).map_err(&broken)?;
        let header = Header::decode(&header);
        queue.note(head, header.noted());
        let len = header.len as usize;
        if len > all - HEADER {
            return Err(broken("a packet is shorter than its header says"));
        }
        // Data of more than `BUF_ALLOC` bytes is not read, because the connection rejects such a packet.
        let data = &mut self.scratch[..if len > BUF_ALLOC { 0 } else { len }];
        self.buffers.read(memory, HEADER, data).map_err(&broken)?;
        queue.add_used(memory, head, 0).map_err(&ring)?;
        self.hub.receive(&header, data);
        Ok(Step::Done)
    }

    /// Sends packets to the guest. Returns true if at least one packet was sent.
    fn serve_rx(&mut self, queues: &mut QueueTable) -> Result<bool, DeviceError> {
        let (mut some, mut asked) = (false, false);
        for _ in 0..BATCH {
            match self.give_packet(queues)? {
                Step::Done => some = true,
                // The device asks for notifications of new buffers only when it has no buffer left.
                Step::Empty if !asked => {
                    asked = true;
                    queues.ask(queue::RX)?;
                }
                Step::Empty | Step::Idle => break,
            }
        }
        if some {
            queues.interrupt(queue::RX)?;
        }
        Ok(some)
    }

    fn give_packet(&mut self, queues: &mut QueueTable) -> Result<Step, DeviceError> {
        const INDEX: u16 = queue::RX;
        let Some((driver, queue)) = queues.get(INDEX) else { return Ok(Step::Idle) };
        if !self.hub.has_output() {
            return Ok(Step::Idle);
        }
        let (ring, broken) = (ring_error(INDEX), broken(INDEX));
        let memory = &driver.memory.view();
        let size = queue.size();
        let Some(chain) = queue.next_chain(memory).map_err(&ring)? else { return Ok(Step::Empty) };
        let head = chain.head_index();
        let all = self.buffers.gather(chain, size, true).map_err(&broken)?;
        if all <= HEADER {
            return Err(broken("a receive buffer has no room for a header and one byte of data"));
        }
        let room = (all - HEADER).min(MOST_DATA);
        let Some(packet) = self.hub.next(room, &mut self.scratch) else {
            queue.put_back(1);
            return Ok(Step::Idle);
        };
        queue.note(head, packet.noted());
        let data = &self.scratch[..packet.len as usize];
        self.buffers.write(memory, 0, &packet.encode()).map_err(&broken)?;
        self.buffers.write(memory, HEADER, data).map_err(&broken)?;
        let used = u32::try_from(HEADER + data.len()).expect("no packet is longer than MOST_DATA");
        queue.add_used(memory, head, used).map_err(&ring)?;
        Ok(Step::Done)
    }

    /// Notifies the guest that its connections were lost, once the guest has added an event buffer.
    fn announce_reset(&mut self, queues: &mut QueueTable) -> Result<(), DeviceError> {
        const INDEX: u16 = queue::EVENT;
        if !self.reset_due {
            return Ok(());
        }
        queues.ask(INDEX)?;
        let Some((driver, queue)) = queues.get(INDEX) else {
            // The driver set up all its queues before this task first ran, and the event queue is not among them. So the device cannot
            // notify the driver. The missing notification does no harm: new clients have other ports, and the device answers each packet of
            // an old connection with a reset.
            self.reset_due = false;
            return Ok(());
        };
        let (ring, broken) = (ring_error(INDEX), broken(INDEX));
        {
            let memory = &driver.memory.view();
            let size = queue.size();
            let Some(chain) = queue.next_chain(memory).map_err(&ring)? else { return Ok(()) };
            let head = chain.head_index();
            let all = self.buffers.gather(chain, size, true).map_err(&broken)?;
            if all < EVENT {
                return Err(broken("an event buffer has no room for an event"));
            }
            self.buffers.write(memory, 0, &EVENT_TRANSPORT_RESET.to_le_bytes()).map_err(&broken)?;
            let used = u32::try_from(EVENT).expect("an event is short");
            queue.add_used(memory, head, used).map_err(&ring)?;
        }
        self.reset_due = false;
        queues.interrupt(INDEX)
    }
}

impl QueueService for Traffic {
    const PANIC_QUEUE: u16 = queue::RX;

    /// Moves all waiting packets in both directions.
    fn serve(&mut self, queues: &mut QueueTable, orders: &Orders) -> Result<Wait, DeviceError> {
        queues.ask(queue::TX)?;
        self.announce_reset(queues)?;
        loop {
            let noticed = self.hub.notice();
            let accepted = !self.reset_due && self.hub.accept();
            let sent = self.serve_tx(queues)?;
            let received = self.serve_rx(queues)?;
            if orders.call() || !(noticed || accepted || sent || received) {
                return Ok(Wait::Source);
            }
        }
    }

    fn source(&self) -> Option<BorrowedFd<'_>> {
        Some(self.hub.source())
    }

    fn failed(&mut self) {
        self.hub.close();
    }
}

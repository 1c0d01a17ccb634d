// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Control queue. Through this queue, the driver sets the number of queue pairs that it uses (virtio 1.4, section 5.1.6.5).

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use log::warn;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress};

use super::spec::{CTRL_ERR, CTRL_MQ, CTRL_MQ_VQ_PAIRS_SET, CTRL_OK, CTRL_VQ, MQ};
use crate::throttle::Throttle;
use crate::virtio::chain::{OUTSIDE, broken, ring_error, walk};
use crate::virtio::notification::{ask_for_notifications, wants_interrupt};
use crate::virtio::queue::DeviceQueue;
use crate::virtio::{DeviceError, Driver, QueueState};
use crate::worker::{Orders, Task, Wait};

/// Size of the control queue. A small queue is enough, because a driver sends one command at a time.
pub(in crate::virtio) const CONTROL_QUEUE_SIZE: u16 = 64;

/// Returns the index of the control queue, on a device with `pairs` pairs of queues. The control queue follows the last pair. A driver that
/// accepts CTRL_VQ without MQ knows only one pair. For this driver, the index is 2 (virtio 1.4, section 5.1.2).
pub(in crate::virtio) fn control_queue(features: u64, pairs: u16) -> u16 {
    if features & (CTRL_VQ | MQ) == CTRL_VQ { 2 } else { 2 * pairs }
}

/// Backend that moves the packets of the pairs of queues.
pub(in crate::virtio) trait Pairs: Send + Sync {
    /// Returns the device's name for logs.
    fn id(&self) -> &str;
    /// Makes the backend use only the first `pairs` pairs of queues.
    ///
    /// # Errors
    /// The backend rejects the number. The number of pairs in use does not change.
    fn set_pairs(&self, pairs: u16) -> io::Result<()>;
}

/// Number of bytes that the device reads from a command: class (1), command (1), and number of pairs (2).
const COMMAND: usize = 4;

/// Command of the driver.
struct Command {
    /// Head of the command's descriptor chain.
    head: u16,
    /// First bytes of the command.
    bytes: [u8; COMMAND],
    /// Number of valid bytes in `bytes`.
    len: usize,
    /// Address of the answer.
    answer: GuestAddress,
}

/// Task of the thread that serves the control queue.
pub(in crate::virtio) struct Control {
    index: u16,
    queue: DeviceQueue,
    driver: Driver,
    host: Arc<dyn Pairs>,
    /// Maximum number of pairs that the driver may use. 0 if the driver did not accept MQ.
    most: u16,
    /// Number of pairs in use.
    pairs: Arc<AtomicU16>,
    failed: bool,
    throttle: Throttle,
}

impl Control {
    /// Creates the task for a device with `most` pairs of queues.
    pub(in crate::virtio) fn new(
        index: u16,
        queue: Queue,
        driver: Driver,
        host: Arc<dyn Pairs>,
        most: u16,
        pairs: Arc<AtomicU16>,
    ) -> Self {
        let most = if driver.features & MQ == 0 { 0 } else { most };
        let queue = DeviceQueue::new(index, queue, &driver);
        Self { index, queue, driver, host, most, pairs, failed: false, throttle: Throttle::default() }
    }

    /// Returns the queue's state.
    pub(in crate::virtio) fn state(&self) -> QueueState {
        QueueState::of(&self.queue)
    }

    fn serve(&mut self, orders: &Orders) -> Result<(), DeviceError> {
        let ring = ring_error(self.index);
        ask_for_notifications(&self.queue, &self.driver.memory.view()).map_err(&ring)?;
        while !orders.call() {
            let Some(Command { head, bytes, len, answer }) = self.next()? else { break };
            let done = self.execute(&bytes[..len]);
            self.queue.note_status(head, done);
            let memory = &self.driver.memory.view();
            memory.write_obj(done, answer).map_err(|_| broken(self.index)(OUTSIDE))?;
            self.queue.add_used(memory, head, 1).map_err(&ring)?;
            if wants_interrupt(&mut self.queue, memory).map_err(&ring)? {
                self.driver.interrupt.queue_used(self.index);
            }
        }
        Ok(())
    }

    fn next(&mut self) -> Result<Option<Command>, DeviceError> {
        let rule = broken(self.index);
        let memory = &self.driver.memory.view();
        let size = self.queue.size();
        let chain = self.queue.next_chain(memory).map_err(ring_error(self.index))?;
        let Some(chain) = chain else { return Ok(None) };
        let head = chain.head_index();
        let (mut bytes, mut len) = ([0; COMMAND], 0);
        for buffer in walk(chain, size) {
            let buffer = buffer.map_err(&rule)?;
            if buffer.writable {
                if buffer.len == 0 {
                    break;
                }
                self.queue.note(head, (bytes[0], bytes[1].into()));
                return Ok(Some(Command { head, bytes, len, answer: buffer.address }));
            }
            let free = &mut bytes[len..];
            let part = buffer.len.min(free.len());
            if part != 0 {
                memory.read_slice(&mut free[..part], buffer.address).map_err(|_| rule(OUTSIDE))?;
                len += part;
            }
        }
        Err(rule("a control command has no writable buffer for the answer"))
    }

    /// Executes a command and returns its answer.
    fn execute(&self, command: &[u8]) -> u8 {
        let [CTRL_MQ, CTRL_MQ_VQ_PAIRS_SET, low, high] = *command else { return CTRL_ERR };
        let pairs = u16::from_le_bytes([low, high]);
        if !(1..=self.most).contains(&pairs) {
            return CTRL_ERR;
        }
        if let Err(error) = self.host.set_pairs(pairs) {
            if self.throttle.pass() {
                warn!("{}: the network backend rejected the use of {pairs} queue pairs: {error}", self.host.id());
            }
            return CTRL_ERR;
        }
        self.pairs.store(pairs, Ordering::Release);
        CTRL_OK
    }
}

impl Task for Control {
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
        self.driver.interrupt.failed(&DeviceError::Panicked { queue: self.index });
    }
}

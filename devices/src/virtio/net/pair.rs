// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Task of the thread that serves a pair of queues.
//!
//! One thread serves both queues of a pair. Most received packets answer transmitted packets, and the host kernel often creates the answer
//! while it accepts the transmitted packet. With a separate receive thread, the host kernel would wake this thread for each packet, while
//! the transmit thread still works. A single thread first transmits all packets, and then reads all answers.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use virtio_queue::Queue;

use super::link::Link;
use super::receive::Receive;
use super::transmit::Transmit;
use super::turn::Turn;
use crate::virtio::{DeviceError, Driver, QueueState};
use crate::worker::{Orders, Task, Wait};

/// Pair of queues. A queue is `None` until it is started.
pub(super) struct Pair {
    driver: Driver,
    link: Arc<Link>,
    receive: Option<Receive>,
    transmit: Option<Transmit>,
    /// Index of the queue that is being served.
    serving: u16,
    failed: bool,
}

/// Returns true if a queue is a receive queue. The receive queue is the first queue of each pair (virtio 1.4, section 5.1.2).
fn receives(queue: u16) -> bool {
    queue.is_multiple_of(2)
}

impl Pair {
    /// Creates a pair without queues.
    pub(super) fn new(driver: Driver, link: Arc<Link>) -> Self {
        Self { driver, link, receive: None, transmit: None, serving: 0, failed: false }
    }

    /// Starts a queue.
    pub(super) fn put(&mut self, index: u16, queue: Queue) {
        let (driver, link) = (self.driver.clone(), self.link.clone());
        if receives(index) {
            self.receive = Some(Receive::new(index, queue, driver, link));
        } else {
            self.transmit = Some(Transmit::new(index, queue, driver, link));
        }
    }

    /// Returns the state of a queue.
    pub(super) fn state(&self, index: u16) -> Option<QueueState> {
        if receives(index) {
            self.receive.as_ref().map(Receive::state)
        } else {
            self.transmit.as_ref().map(Transmit::state)
        }
    }

    /// Stops a queue and returns its state.
    pub(super) fn take(&mut self, index: u16) -> Option<QueueState> {
        let state = self.state(index);
        if receives(index) {
            self.receive = None;
        } else {
            self.transmit = None;
        }
        state
    }

    /// Returns true if no queue is left.
    pub(super) fn is_empty(&self) -> bool {
        self.receive.is_none() && self.transmit.is_none()
    }

    /// Serves the two queues alternately, until both queues are idle or the thread receives an order.
    fn serve(&mut self, orders: &Orders) -> Result<Wait, DeviceError> {
        loop {
            let (mut wait, mut more) = (Wait::Doorbell, false);
            let mut note = |turn| match turn {
                Turn::More => more = true,
                Turn::Wait(until) => wait = wait.or(until),
            };
            if let Some(transmit) = &mut self.transmit {
                self.serving = transmit.index;
                note(transmit.turn(orders)?);
            }
            if let Some(receive) = &mut self.receive {
                self.serving = receive.index;
                note(receive.turn(orders)?);
            }
            if !more || orders.call() {
                return Ok(wait);
            }
        }
    }
}

impl Task for Pair {
    fn run(&mut self, orders: &Orders) -> Wait {
        if self.failed {
            return Wait::Doorbell;
        }
        self.serve(orders).unwrap_or_else(|error| {
            self.failed = true;
            self.driver.interrupt.failed(&error);
            Wait::Doorbell
        })
    }

    fn source(&self) -> Option<BorrowedFd<'_>> {
        self.receive.as_ref().map(Receive::source)
    }

    fn panicked(&self) {
        self.driver.interrupt.failed(&DeviceError::Panicked { queue: self.serving });
    }
}

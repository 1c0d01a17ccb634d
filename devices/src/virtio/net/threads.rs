// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Threads of a device: one for each pair of queues, and one for the control queue.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU16;

use virtio_queue::Queue;

use super::control::{Control, control_queue};
use super::link::Link;
use super::pair::Pair;
use crate::sandbox::{ThreadRole, calls};
use crate::virtio::queue_worker::{QueueTask, QueueWorker, Thread};
use crate::virtio::{Driver, QueueState};
use crate::worker::{Orders, Task, Wait};

/// Role of the threads that serve a pair of queues. These threads read and write the files of the host interface.
pub const ROLE: ThreadRole = ThreadRole { name: "net", calls: &[] };
/// Role of the thread that serves the control queue. This thread configures the host interface.
pub const CONTROL_ROLE: ThreadRole = ThreadRole { name: "net_control", calls: &[calls::TAP] };

/// Creates the threads of a device with `queues` queues. The device has `most` pairs of queues, and its driver uses the first `pairs`
/// pairs.
///
/// # Errors
/// The process has no free file descriptor.
pub(super) fn threads(
    link: Arc<Link>,
    queues: usize,
    most: u16,
    pairs: Arc<AtomicU16>,
) -> io::Result<QueueWorker<Work>> {
    // The queue after the last pair is always a control queue, regardless of the features that the driver accepted.
    let is_last = move |index| index == 2 * most;
    let is_control = move |index, driver: &Driver| is_last(index) || index == control_queue(driver.features, most);
    // If the driver accepted CTRL_VQ without MQ, the control queue has index 2, which may lie within the pairs. In this case, the control
    // queue has its own thread, separate from the thread of the pair.
    let is_moved = move |index, driver: &_| !is_last(index) && is_control(index, driver);
    QueueWorker::several(queues, 2, is_moved, move |driver, index, queue, _| {
        let id = &link.id;
        if is_control(index, &driver) {
            let control = Control::new(index, queue, driver, link.clone(), most, pairs.clone());
            let thread = Thread { name: format!("{id}_ctrl"), role: CONTROL_ROLE, cpus: None };
            return Ok((thread, Work::Control(control)));
        }
        let mut pair = Box::new(Pair::new(driver, link.clone()));
        pair.put(index, queue);
        Ok((Thread { name: format!("{id}_qp{}", index / 2), role: ROLE, cpus: None }, Work::Pair(pair)))
    })
}

/// Task of a thread.
pub(super) enum Work {
    Pair(Box<Pair>),
    Control(Control),
}

impl QueueTask for Work {
    fn put(&mut self, index: u16, queue: Queue) {
        if let Self::Pair(pair) = self {
            pair.put(index, queue);
        }
    }

    fn take(&mut self, index: u16) -> Option<QueueState> {
        match self {
            Self::Pair(pair) => pair.take(index),
            Self::Control(control) => Some(control.state()),
        }
    }

    fn state(&self, index: u16) -> Option<QueueState> {
        match self {
            Self::Pair(pair) => pair.state(index),
            Self::Control(control) => Some(control.state()),
        }
    }

    fn is_idle(&self) -> bool {
        match self {
            Self::Pair(pair) => pair.is_empty(),
            Self::Control(_) => true,
        }
    }
}

impl Task for Work {
    fn run(&mut self, orders: &Orders) -> Wait {
        match self {
            Self::Pair(pair) => pair.run(orders),
            Self::Control(control) => control.run(orders),
        }
    }

    fn source(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Pair(pair) => pair.source(),
            Self::Control(control) => control.source(),
        }
    }

    fn panicked(&self) {
        match self {
            Self::Pair(pair) => pair.panicked(),
            Self::Control(control) => control.panicked(),
        }
    }
}

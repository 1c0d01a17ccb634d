// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The thread of a queue, of whichever kind that is.

use super::control::Control;
use super::receive::Receive;
use super::transmit::Transmit;
use crate::virtio::QueueState;
use crate::worker::Worker;

/// A thread with its queue.
pub(super) enum QueueWorker {
    Receive(Worker<Receive>),
    Transmit(Worker<Transmit>),
    Control(Worker<Control>),
}

impl QueueWorker {
    pub(super) fn pause(&self) {
        match self {
            Self::Receive(worker) => worker.pause(),
            Self::Transmit(worker) => worker.pause(),
            Self::Control(worker) => worker.pause(),
        }
    }

    pub(super) fn resume(&self) {
        match self {
            Self::Receive(worker) => worker.resume(),
            Self::Transmit(worker) => worker.resume(),
            Self::Control(worker) => worker.resume(),
        }
    }

    /// How far the queue is served, of a thread that is paused.
    pub(super) fn state(&self) -> QueueState {
        match self {
            Self::Receive(worker) => worker.with_task(|task| task.state()),
            Self::Transmit(worker) => worker.with_task(|task| task.state()),
            Self::Control(worker) => worker.with_task(|task| task.state()),
        }
    }

    /// Ends the thread.
    pub(super) fn stop(self) -> QueueState {
        match self {
            Self::Receive(worker) => worker.stop(|task| task.state()),
            Self::Transmit(worker) => worker.stop(|task| task.state()),
            Self::Control(worker) => worker.stop(|task| task.state()),
        }
    }
}

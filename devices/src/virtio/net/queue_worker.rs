// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A thread with its queues, of whichever kind they are.

use super::control::Control;
use super::pair::Pair;
use crate::virtio::QueueState;
use crate::worker::Worker;

/// A thread with its queues.
pub(super) enum QueueWorker {
    Pair(Worker<Pair>),
    Control(Worker<Control>),
}

impl QueueWorker {
    pub(super) fn pause(&self) {
        match self {
            Self::Pair(worker) => worker.pause(),
            Self::Control(worker) => worker.pause(),
        }
    }

    pub(super) fn resume(&self) {
        match self {
            Self::Pair(worker) => worker.resume(),
            Self::Control(worker) => worker.resume(),
        }
    }

    /// How far a queue is served, of a thread that is paused.
    pub(super) fn state(&self, queue: u16) -> Option<QueueState> {
        match self {
            Self::Pair(worker) => worker.with_task(|task| task.state(queue)),
            Self::Control(worker) => Some(worker.with_task(|task| task.state())),
        }
    }

    /// Takes a queue from a thread that is paused; `true` if it was its last one.
    pub(super) fn take(&self, queue: u16) -> (Option<QueueState>, bool) {
        match self {
            Self::Pair(worker) => worker.with_task(|task| (task.take(queue), task.is_empty())),
            Self::Control(worker) => (Some(worker.with_task(|task| task.state())), true),
        }
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Notifications (kicks) from this process to the server. Such notifications are rare, because KVM usually writes the eventfd for a
//! driver's notification.
//!
//! A server can fill the counter of an eventfd and clear `O_NONBLOCK`, which is a flag of the shared open file. A write then blocks. So a
//! separate thread writes the eventfd, and no other thread waits for this thread. In the worst case, the separate thread blocks until the
//! process ends.

use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use super::ROLE;
use super::events::QueueEvents;
use crate::sandbox;
use crate::sync::lock;

#[derive(Default)]
struct State {
    /// True for each queue to notify.
    wanted: Vec<bool>,
    ended: bool,
}

struct Shared {
    events: Arc<Vec<QueueEvents>>,
    state: Mutex<State>,
    changed: Condvar,
}

/// Handle of the thread. Dropping the handle tells the thread to end, but does not wait for the thread.
pub(super) struct Kicker(Arc<Shared>);

impl Kicker {
    pub(super) fn new(id: &str, events: Arc<Vec<QueueEvents>>) -> io::Result<Self> {
        let state = State { wanted: vec![false; events.len()], ended: false };
        let shared = Arc::new(Shared { events, state: Mutex::new(state), changed: Condvar::new() });
        let of_thread = shared.clone();
        sandbox::start(ROLE, format!("{id}_kick"), move || of_thread.run())?;
        Ok(Self(shared))
    }

    /// Notifies the server, so that the server checks this queue.
    pub(super) fn kick(&self, queue: u16) {
        if let Some(wanted) = lock(&self.0.state).wanted.get_mut(usize::from(queue)) {
            *wanted = true;
        }
        self.0.changed.notify_all();
    }
}

impl Drop for Kicker {
    fn drop(&mut self) {
        lock(&self.0.state).ended = true;
        self.0.changed.notify_all();
    }
}

impl Shared {
    fn run(&self) {
        let mut state = lock(&self.state);
        while !state.ended {
            let Some(queue) = state.wanted.iter().position(|wanted| *wanted) else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            state.wanted[queue] = false;
            drop(state);
            // The write fails if the counter is full. In this case, the server was already notified.
            let _ = self.events[queue].kick.write(1);
            state = lock(&self.state);
        }
    }
}

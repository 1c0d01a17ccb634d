// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Kicks of this process's own. They are rare: the host's kernel writes those of the driver.
//!
//! A server can fill the counter of an event that it has, and have a write wait (`O_NONBLOCK` is a flag of the open file). So a thread that
//! nobody waits for does it: at worst it stays until the process ends.

use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use super::ROLE;
use super::events::QueueEvents;
use crate::sandbox;
use crate::sync::lock;

#[derive(Default)]
struct State {
    /// The queues to be kicked.
    wanted: Vec<bool>,
    ended: bool,
}

struct Shared {
    events: Arc<Vec<QueueEvents>>,
    state: Mutex<State>,
    changed: Condvar,
}

/// Whoever kicks. Dropping it tells the thread to end.
pub(super) struct Kicker(Arc<Shared>);

impl Kicker {
    pub(super) fn new(id: &str, events: Arc<Vec<QueueEvents>>) -> io::Result<Self> {
        let state = State { wanted: vec![false; events.len()], ended: false };
        let shared = Arc::new(Shared { events, state: Mutex::new(state), changed: Condvar::new() });
        let of_thread = shared.clone();
        sandbox::start(ROLE, format!("{id}_kick"), move || of_thread.run())?;
        Ok(Self(shared))
    }

    /// Has the server look at a queue.
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
            // It fails where the counter is full, and then the server has been told.
            let _ = self.events[queue].kick.write(1);
            state = lock(&self.state);
        }
    }
}

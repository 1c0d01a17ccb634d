// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A value of tests that tells which thread drops it.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, ThreadId};

/// Tells which thread drops it.
pub(crate) struct DropWitness(Sender<ThreadId>);

impl DropWitness {
    /// One, and where it tells.
    pub(crate) fn new() -> (Self, Receiver<ThreadId>) {
        let (tell, told) = channel();
        (Self(tell), told)
    }
}

impl Drop for DropWitness {
    fn drop(&mut self) {
        // The test may have failed already.
        let _ = self.0.send(thread::current().id());
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Value for tests that reports the thread that drops it.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, ThreadId};

/// Reports the thread that drops it.
pub(crate) struct DropReporter(Sender<ThreadId>);

impl DropReporter {
    /// Creates a reporter, and the receiver of its report.
    pub(crate) fn new() -> (Self, Receiver<ThreadId>) {
        let (sender, receiver) = channel();
        (Self(sender), receiver)
    }
}

impl Drop for DropReporter {
    fn drop(&mut self) {
        // The receiver may be gone, if the test has failed already.
        let _ = self.0.send(thread::current().id());
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Test value that reports which thread has dropped the value.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, ThreadId};

/// Value that reports the ID of the thread that drops the value.
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
        // The receiver may no longer exist, if the test has failed already.
        let _ = self.0.send(thread::current().id());
    }
}

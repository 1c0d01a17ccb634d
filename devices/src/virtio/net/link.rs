// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the queues of a device share.

use std::fs::File;

use super::carrier::Carrier;
use super::counters::Counts;

/// The host's side and the counts.
pub(super) struct Link {
    pub(super) id: String,
    pub(super) carrier: Box<dyn Carrier>,
    pub(super) counts: Counts,
}

impl Link {
    /// The file of the pair that a queue belongs to: each has one to receive, then one to transmit (virtio 1.4, section 5.1.2).
    pub(super) fn file(&self, queue: u16) -> &File {
        self.carrier.file(queue / 2)
    }
}

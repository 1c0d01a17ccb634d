// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The rings in which the last requests to a device are kept, for reports of crashes.

use std::sync::OnceLock;

use crate::crash::{Claim, Ring, RingKind};

/// The rings of a device, one for each queue that it serves. They outlive resets: what came before one may be why the process crashes.
#[derive(Default)]
pub struct LastRequests {
    id: String,
    device_type: u16,
    /// By queue. A ring is taken when the queue is served first; `None` in it if none was left.
    queues: Vec<OnceLock<Option<Claim>>>,
}

impl LastRequests {
    /// For a device with so many queues. By [`Default`] nothing is kept.
    pub(super) fn new(id: &str, device_type: u16, queues: usize) -> Self {
        Self { id: id.into(), device_type, queues: (0..queues).map(|_| OnceLock::new()).collect() }
    }

    /// The ring of a queue.
    pub(super) fn of_queue(&self, index: u16) -> Option<&'static Ring> {
        let place = self.queues.get(usize::from(index))?;
        let kind = RingKind::Queue { device: self.device_type, index };
        place.get_or_init(|| Claim::new(&self.id, kind)).as_ref().map(Claim::ring)
    }
}

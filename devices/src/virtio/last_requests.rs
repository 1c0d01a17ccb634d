// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Ring buffers that record the last requests to a device, for crash reports.

use std::sync::OnceLock;

use crate::crash::{Claim, Ring, RingKind};

/// Ring buffers of a device, one for each queue that the device serves. A reset keeps the ring buffers, because a request before the reset
/// may have caused a crash.
#[derive(Default)]
pub struct LastRequests {
    id: String,
    device_type: u16,
    /// Ring buffer of each queue. The device claims a ring buffer when it first serves the queue. If no ring buffer is free at this time,
    /// the element contains `None`.
    queues: Vec<OnceLock<Option<Claim>>>,
}

impl LastRequests {
    /// Returns the record of a device with `queues` queues. The [`Default`] value records nothing.
    pub(super) fn new(id: &str, device_type: u16, queues: usize) -> Self {
        Self { id: id.into(), device_type, queues: (0..queues).map(|_| OnceLock::new()).collect() }
    }

    /// Returns the ring buffer of a queue, or `None` if the queue has no ring buffer.
    pub(super) fn of_queue(&self, index: u16) -> Option<&'static Ring> {
        let place = self.queues.get(usize::from(index))?;
        let kind = RingKind::Queue { device: self.device_type, index };
        place.get_or_init(|| Claim::new(&self.id, kind)).as_ref().map(Claim::ring)
    }
}

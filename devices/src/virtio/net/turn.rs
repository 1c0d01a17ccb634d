// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Turns: one thread serves several queues alternately, a limited number of packets at a time.

use std::time::{Duration, Instant};

use crate::virtio::chain::ring_error;
use crate::virtio::queue::DeviceQueue;
use crate::virtio::used_batch::wants_interrupt;
use crate::virtio::{DeviceError, Driver};
use crate::worker::Wait;

/// Result of a queue's turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// The queue may have more packets, but the thread serves the other queue first.
    More,
    /// The queue has nothing to do until this event.
    Wait(Wait),
}

/// Delay of a queue. The queue does nothing until the delay is over, even if the thread is woken for the other queue.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rest(Option<Instant>);

impl Rest {
    /// Starts a delay of `time`.
    pub(super) fn begin(&mut self, time: Duration) -> Turn {
        self.0 = Instant::now().checked_add(time);
        Turn::Wait(Wait::Time(time))
    }

    /// Returns the remaining delay, or `None` if the delay is over.
    pub(super) fn left(&mut self) -> Option<Duration> {
        let left = self.0?.saturating_duration_since(Instant::now());
        if left.is_zero() {
            self.0 = None;
        }
        self.0.map(|_| left)
    }
}

/// Ends a turn of queue `index`. `since` is the used index at the start of the turn. Interrupts the driver if it wants an interrupt for the
/// buffers that the device has used since then.
pub(super) fn notify_driver(queue: &DeviceQueue, driver: &Driver, index: u16, since: u16) -> Result<(), DeviceError> {
    if wants_interrupt(queue, &driver.memory.view(), since).map_err(ring_error(index))? {
        driver.interrupt.queue_used(index);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rest_ends_after_its_time() {
        let mut rest = Rest::default();
        assert_eq!(rest.left(), None);
        let hour = Duration::from_secs(3600);
        assert_eq!(rest.begin(hour), Turn::Wait(Wait::Time(hour)));
        assert!(rest.left().is_some_and(|left| left <= hour));
        rest.begin(Duration::ZERO);
        assert_eq!(rest.left(), None);
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a network device counts.

use std::sync::atomic::{AtomicU64, Ordering};

/// What the device has done since it was made. Received is what the guest has received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NetCounters {
    /// Packets that the guest has received.
    pub rx_frames: u64,
    /// Bytes of these, without the device's own header.
    pub rx_bytes: u64,
    /// Packets that were lost on their way to the guest: its buffers were too small.
    pub rx_dropped: u64,
    /// Packets that the guest has sent.
    pub tx_frames: u64,
    /// Bytes of these, without the device's own header.
    pub tx_bytes: u64,
    /// Packets that were lost on their way from the guest: they are none, or the host does not take them.
    pub tx_dropped: u64,
    /// How often the host's interface could not be read.
    pub host_errors: u64,
    /// How often a queue has waited because of the limit on the rate.
    pub rate_waits: u64,
}

/// The same, as workers count.
#[derive(Default)]
pub(super) struct Counts {
    pub(super) rx_frames: AtomicU64,
    pub(super) rx_bytes: AtomicU64,
    pub(super) rx_dropped: AtomicU64,
    pub(super) tx_frames: AtomicU64,
    pub(super) tx_bytes: AtomicU64,
    pub(super) tx_dropped: AtomicU64,
    pub(super) host_errors: AtomicU64,
    pub(super) rate_waits: AtomicU64,
}

impl Counts {
    pub(super) fn read(&self) -> NetCounters {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        NetCounters {
            rx_frames: read(&self.rx_frames),
            rx_bytes: read(&self.rx_bytes),
            rx_dropped: read(&self.rx_dropped),
            tx_frames: read(&self.tx_frames),
            tx_bytes: read(&self.tx_bytes),
            tx_dropped: read(&self.tx_dropped),
            host_errors: read(&self.host_errors),
            rate_waits: read(&self.rate_waits),
        }
    }
}

/// Adds to a count, whose order to others says nothing.
pub(super) fn count(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

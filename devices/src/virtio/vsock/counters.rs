// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a vsock device counts.

use std::sync::atomic::{AtomicU64, Ordering};

/// What the device has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VsockCounters {
    /// Packets of the guest.
    pub tx_packets: u64,
    /// Bytes of the guest that connections carried.
    pub tx_bytes: u64,
    /// Packets for the guest.
    pub rx_packets: u64,
    /// Bytes for the guest that connections carried.
    pub rx_bytes: u64,
    /// Connections that came about, of either side.
    pub connections: u64,
    /// Connections that did not, as the host's side has nobody there or there were too many.
    pub refused: u64,
    /// Connections that the device reset, as the guest broke a rule.
    pub resets: u64,
}

/// The same, as the worker counts.
#[derive(Default)]
pub(super) struct Counts {
    pub(super) tx_packets: AtomicU64,
    pub(super) tx_bytes: AtomicU64,
    pub(super) rx_packets: AtomicU64,
    pub(super) rx_bytes: AtomicU64,
    pub(super) connections: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) resets: AtomicU64,
}

impl Counts {
    pub(super) fn read(&self) -> VsockCounters {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        VsockCounters {
            tx_packets: read(&self.tx_packets),
            tx_bytes: read(&self.tx_bytes),
            rx_packets: read(&self.rx_packets),
            rx_bytes: read(&self.rx_bytes),
            connections: read(&self.connections),
            refused: read(&self.refused),
            resets: read(&self.resets),
        }
    }
}

/// Counts so many more.
pub(super) fn count(counter: &AtomicU64, more: u64) {
    counter.fetch_add(more, Ordering::Relaxed);
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a virtio-console device counts.

use std::sync::atomic::{AtomicU64, Ordering};

/// What the device has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ConsoleCounters {
    /// Bytes that the guest printed.
    pub tx_bytes: u64,
    /// Bytes that the guest got.
    pub rx_bytes: u64,
    /// How often the guest was told of the terminal's size.
    pub resizes: u64,
}

/// The same, as the worker counts.
#[derive(Default)]
pub(super) struct Counts {
    pub(super) tx_bytes: AtomicU64,
    pub(super) rx_bytes: AtomicU64,
    pub(super) resizes: AtomicU64,
}

impl Counts {
    pub(super) fn read(&self) -> ConsoleCounters {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        ConsoleCounters { tx_bytes: read(&self.tx_bytes), rx_bytes: read(&self.rx_bytes), resizes: read(&self.resizes) }
    }
}

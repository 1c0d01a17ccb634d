// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Accesses of devices that were stopped, on their way to the driver of the virtio-iommu.
//!
//! Whoever stops an access must not wait for the engine: the engine may be waiting for the very device, or for the server
//! behind it. So faults go through a short queue to a thread of their own. Those that find the queue full are counted.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use iommu_bounce::{EndpointId, Permissions};

use crate::sandbox::{self, ThreadRole};

/// Role of the thread that reports stopped accesses to the driver of the virtio-iommu.
pub const FAULTS_ROLE: ThreadRole = ThreadRole { name: "dma-faults", calls: &[] };

/// As many as the driver may be told at once.
const QUEUE: usize = 64;

/// An access that was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped {
    /// Whose access it was.
    pub endpoint: EndpointId,
    /// The first address that it may not access so.
    pub iova: u64,
    /// What the device wanted to do there.
    pub access: Permissions,
}

/// Whoever tells the guest's driver.
pub trait FaultReporter: Send + Sync {
    /// Reports an access that was stopped.
    fn report_stopped(&self, stopped: Stopped);
    /// Counts faults that nobody is told of.
    fn count_lost_faults(&self, count: u64);
}

/// Takes accesses that were stopped. Clones lead to the same driver.
#[derive(Clone)]
pub struct FaultSender {
    queue: SyncSender<Stopped>,
    lost: Arc<AtomicU64>,
}

impl FaultSender {
    /// Passes one on, or counts it. It never waits.
    pub(crate) fn send(&self, stopped: Stopped) {
        if self.queue.try_send(stopped).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// The other end, until there is a virtio-iommu.
pub struct FaultRelay {
    queue: Receiver<Stopped>,
    lost: Arc<AtomicU64>,
}

/// A way for the faults of devices whose DMA goes through this process.
pub fn fault_relay() -> (FaultSender, FaultRelay) {
    let (sender, receiver) = sync_channel(QUEUE);
    let lost = Arc::new(AtomicU64::new(0));
    (FaultSender { queue: sender, lost: lost.clone() }, FaultRelay { queue: receiver, lost })
}

impl FaultRelay {
    /// Passes faults on to `reporter`, as long as it and a sender are there.
    ///
    /// # Errors
    /// The host gives no thread.
    pub fn spawn(self, reporter: &Arc<impl FaultReporter + 'static>) -> io::Result<()> {
        let reporter = Arc::downgrade(reporter);
        let run = move || {
            while let Ok(stopped) = self.queue.recv() {
                let Some(reporter) = reporter.upgrade() else { return };
                reporter.report_stopped(stopped);
                let lost = self.lost.swap(0, Ordering::Relaxed);
                if lost != 0 {
                    reporter.count_lost_faults(lost);
                }
            }
        };
        sandbox::start(FAULTS_ROLE, FAULTS_ROLE.name.into(), run).map(drop)
    }

    /// What came so far.
    #[cfg(test)]
    pub(crate) fn take(&self) -> (Vec<Stopped>, u64) {
        (self.queue.try_iter().collect(), self.lost.swap(0, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flood_is_counted_and_never_waits() {
        let (sender, relay) = fault_relay();
        let stopped = Stopped { endpoint: 24, iova: 0x1000, access: Permissions::WRITE };
        (0..1000).for_each(|_| sender.send(stopped));
        let (came, lost) = relay.take();
        assert_eq!((came.len(), lost), (QUEUE, 1000 - QUEUE as u64));
        assert!(came.iter().all(|fault| *fault == stopped));
        drop(relay);
        sender.send(stopped);
    }
}

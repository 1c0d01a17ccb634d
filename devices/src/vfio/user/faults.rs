// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Accesses of servers that were stopped, on their way to the driver of the virtio-iommu.
//!
//! Who stops them must not wait for the engine, which may be waiting for the very server. So they go through a short
//! queue to a thread of their own, and those that find it full are counted.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use iommu_bounce::{EndpointId, Fault, FaultReason, Permissions};

use crate::virtio::iommu::IommuHandle;

/// As many as the driver may be told at once.
const QUEUE: usize = 64;

/// An access that was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stopped {
    pub(super) endpoint: EndpointId,
    pub(super) iova: u64,
    pub(super) access: Permissions,
}

/// Takes accesses that were stopped. Clones lead to the same driver.
#[derive(Clone)]
pub struct FaultSender {
    queue: SyncSender<Stopped>,
    lost: Arc<AtomicU64>,
}

impl FaultSender {
    /// Passes one on, or counts it. It never waits.
    pub(super) fn send(&self, stopped: Stopped) {
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

/// A way for faults of vfio-user devices.
pub fn fault_relay() -> (FaultSender, FaultRelay) {
    let (sender, receiver) = sync_channel(QUEUE);
    let lost = Arc::new(AtomicU64::new(0));
    (FaultSender { queue: sender, lost: lost.clone() }, FaultRelay { queue: receiver, lost })
}

impl FaultRelay {
    /// Passes faults on to the driver of `iommu`, as long as it and a sender are there.
    ///
    /// # Errors
    /// The host gives no thread.
    pub fn spawn(self, iommu: &Arc<IommuHandle>) -> io::Result<()> {
        let iommu = Arc::downgrade(iommu);
        let run = move || {
            while let Ok(Stopped { endpoint, iova, access }) = self.queue.recv() {
                let Some(iommu) = iommu.upgrade() else { return };
                // It knows, and reports, whether the endpoint is in a domain at all.
                if iommu.translate(endpoint, iova, access).is_ok() {
                    // It was mapped since.
                    iommu.report_fault(Fault { reason: FaultReason::Mapping, endpoint, address: Some(iova), access });
                }
                iommu.count_lost_faults(self.lost.swap(0, Ordering::Relaxed));
            }
        };
        thread::Builder::new().name("vfio-user-faults".into()).spawn(run).map(drop)
    }

    /// What came so far.
    #[cfg(test)]
    pub(super) fn take(&self) -> (Vec<Stopped>, u64) {
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

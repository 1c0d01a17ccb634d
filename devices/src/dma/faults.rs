// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Accesses of devices that were stopped, on their way to the driver of the virtio-iommu.
//!
//! Whoever stops an access must not wait for the engine: the engine may be waiting for the very device, or for the server
//! behind it. So faults go through a short queue to a thread of their own. Those that find the queue full are counted.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};

use iommu_bounce::{EndpointId, Permissions};

use crate::sandbox::{self, ThreadRole};
use crate::sync::lock;

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

/// Reports of faults. Dropping it ends them, and waits for one that is under way.
///
/// The thread only borrows the reporter: it may not make the system calls that the end of a virtio-iommu takes.
pub struct FaultReports(Arc<Mutex<Option<Arc<dyn FaultReporter>>>>);

impl Drop for FaultReports {
    fn drop(&mut self) {
        lock(&self.0).take();
    }
}

/// A way for the faults of devices whose DMA goes through this process.
pub fn fault_relay() -> (FaultSender, FaultRelay) {
    let (sender, receiver) = sync_channel(QUEUE);
    let lost = Arc::new(AtomicU64::new(0));
    (FaultSender { queue: sender, lost: lost.clone() }, FaultRelay { queue: receiver, lost })
}

impl FaultRelay {
    /// Passes faults on to `reporter` until the result is dropped.
    ///
    /// # Errors
    /// The host gives no thread.
    pub fn spawn(self, reporter: Arc<dyn FaultReporter>) -> io::Result<FaultReports> {
        let reports = FaultReports(Arc::new(Mutex::new(Some(reporter))));
        let of_thread = reports.0.clone();
        let run = move || {
            while let Ok(stopped) = self.queue.recv() {
                let reporter = lock(&of_thread);
                let Some(reporter) = &*reporter else { return };
                reporter.report_stopped(stopped);
                let lost = self.lost.swap(0, Ordering::Relaxed);
                if lost != 0 {
                    reporter.count_lost_faults(lost);
                }
            }
        };
        sandbox::start(FAULTS_ROLE, FAULTS_ROLE.name.into(), run)?;
        Ok(reports)
    }

    /// What came so far.
    #[cfg(test)]
    pub(crate) fn take(&self) -> (Vec<Stopped>, u64) {
        (self.queue.try_iter().collect(), self.lost.swap(0, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};
    use std::thread;

    use super::*;
    use crate::drop_witness::DropWitness;

    /// Tells that it reports.
    struct Reporter(Sender<()>, #[expect(dead_code, reason = "it tells when it is dropped")] DropWitness);

    impl FaultReporter for Reporter {
        fn report_stopped(&self, _: Stopped) {
            self.0.send(()).unwrap();
            // The owner lets go of it meanwhile.
            thread::sleep(std::time::Duration::from_millis(20));
        }
        fn count_lost_faults(&self, _: u64) {}
    }

    #[test]
    fn thread_that_reports_never_drops_the_reporter() {
        let (sender, relay) = fault_relay();
        let (tell, told) = channel();
        let (witness, dropped) = DropWitness::new();
        let reports = relay.spawn(Arc::new(Reporter(tell, witness))).unwrap();
        sender.send(Stopped { endpoint: 24, iova: 0x1000, access: Permissions::WRITE });
        told.recv().unwrap();
        drop(reports);
        assert_eq!(dropped.recv(), Ok(thread::current().id()));
    }

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

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Queue of denied accesses. A separate thread reports these accesses to the driver of the virtio-iommu.
//!
//! A thread that denies an access must not take the engine lock. The holder of this lock may be waiting for the same device or its server,
//! so both threads would wait for ever (deadlock). So the thread adds the fault to a short queue. A separate thread then takes the lock and
//! reports the fault. If the queue is full, the fault is only counted.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};

use iommu_bounce::{EndpointId, Permissions};

use crate::sandbox::{self, ThreadRole};
use crate::sync::lock;

/// Role of the thread that reports denied accesses to the driver of the virtio-iommu.
pub const FAULTS_ROLE: ThreadRole = ThreadRole { name: "dma-faults", calls: &[] };

/// Maximum number of queued faults. The engine has the same limit for faults that wait for the driver.
const QUEUE: usize = 64;

/// Denied access of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopped {
    /// Endpoint that made the access.
    pub endpoint: EndpointId,
    /// First address at which the access is denied.
    pub iova: u64,
    /// Kind of the access.
    pub access: Permissions,
}

/// Reporter of faults to the guest's driver.
pub trait FaultReporter: Send + Sync {
    /// Reports a denied access.
    fn report_stopped(&self, stopped: Stopped);
    /// Counts faults that are not reported.
    fn count_lost_faults(&self, count: u64);
}

/// Sending end of the queue. All clones report to the same driver.
#[derive(Clone)]
pub struct FaultSender {
    queue: SyncSender<Stopped>,
    lost: Arc<AtomicU64>,
}

impl FaultSender {
    /// Queues a denied access. If the queue is full, counts the access as lost. Never waits.
    pub(crate) fn send(&self, stopped: Stopped) {
        if self.queue.try_send(stopped).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Receiving end of the queue. The queue keeps faults until the virtio-iommu exists and [`Self::spawn`] is called.
pub struct FaultRelay {
    queue: Receiver<Stopped>,
    lost: Arc<AtomicU64>,
}

/// Handle of the reporting thread. Dropping the handle ends the reports, and waits for a report in progress.
///
/// The thread never drops the reporter, because the thread's sandbox forbids system calls that dropping a virtio-iommu needs.
pub struct FaultReports(Arc<Mutex<Option<Arc<dyn FaultReporter>>>>);

impl Drop for FaultReports {
    fn drop(&mut self) {
        lock(&self.0).take();
    }
}

/// Creates a queue for the faults of devices whose DMA goes through this process.
pub fn fault_relay() -> (FaultSender, FaultRelay) {
    let (sender, receiver) = sync_channel(QUEUE);
    let lost = Arc::new(AtomicU64::new(0));
    (FaultSender { queue: sender, lost: lost.clone() }, FaultRelay { queue: receiver, lost })
}

impl FaultRelay {
    /// Starts a thread that passes the queued faults to `reporter`. The reports end when the returned handle is dropped.
    ///
    /// # Errors
    /// The host cannot start a thread.
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

    /// Removes and returns the queued faults and the number of lost faults.
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
    use crate::drop_reporter::DropReporter;

    /// Reporter that notifies the test of each report.
    struct Reporter(Sender<()>, #[expect(dead_code, reason = "the test observes its drop")] DropReporter);

    impl FaultReporter for Reporter {
        fn report_stopped(&self, _: Stopped) {
            self.0.send(()).unwrap();
            // Give the test time to drop the `FaultReports` handle during the report.
            thread::sleep(std::time::Duration::from_millis(20));
        }
        fn count_lost_faults(&self, _: u64) {}
    }

    #[test]
    fn reporting_thread_never_drops_the_reporter() {
        let (sender, relay) = fault_relay();
        let (end, ended) = channel();
        let (drop_reporter, dropped) = DropReporter::new();
        let reports = relay.spawn(Arc::new(Reporter(end, drop_reporter))).unwrap();
        sender.send(Stopped { endpoint: 24, iova: 0x1000, access: Permissions::WRITE });
        ended.recv().unwrap();
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

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What the queues of a disk have in common, and who answers for the I/O of one.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use vmm_sys_util::eventfd::EventFd;

use super::counters::Counts;
use super::image::disk_image::Image;
use super::io::engine::IoMode;
use super::spec::ID_BYTES;
use crate::dma::IoOwner;
use crate::rate_limit::RateLimiter;
use crate::sandbox::HostCpus;
use crate::sync::lock;
use crate::virtio::{DeviceError, Interrupt};

/// What all queues of a disk have in common.
pub(super) struct Disk {
    /// Its name, for logs and threads.
    pub(super) id: String,
    pub(super) image: Arc<Image>,
    /// What it is called in the guest.
    pub(super) serial: [u8; ID_BYTES],
    pub(super) counts: Counts,
    pub(super) mode: IoMode,
    /// What holds requests back; other disks may have the same.
    pub(super) limiter: Option<Arc<RateLimiter>>,
    /// CPUs of the host that queues' threads run on, by queue; any for those that are not there.
    pub(super) affinity: BTreeMap<u16, HostCpus>,
}

/// Answers for I/O of the kernel into memory that may be taken away meanwhile.
pub(super) struct Owner {
    queue: u16,
    interrupt: Arc<dyn Interrupt>,
    /// Wakes the thread.
    doorbell: EventFd,
    /// Numbers of operations that are to end.
    unwanted: Mutex<Vec<u64>>,
    any: AtomicBool,
}

impl Owner {
    /// Of the queue `index`; `doorbell` wakes its thread.
    pub(super) fn new(queue: u16, interrupt: Arc<dyn Interrupt>, doorbell: EventFd) -> Self {
        Self { queue, interrupt, doorbell, unwanted: Mutex::default(), any: AtomicBool::new(false) }
    }

    /// Numbers of operations that are to end, once.
    pub(super) fn take_unwanted(&self) -> Vec<u64> {
        if !self.any.swap(false, Ordering::Acquire) {
            return Vec::new();
        }
        std::mem::take(&mut *lock(&self.unwanted))
    }
}

impl IoOwner for Owner {
    fn cancel(&self, number: u64) {
        lock(&self.unwanted).push(number);
        self.any.store(true, Ordering::Release);
        // It fails where it was rung 2^64 times already.
        let _ = self.doorbell.write(1);
    }

    fn give_up(&self) {
        self.interrupt.failed(&DeviceError::Stuck { queue: self.queue });
    }
}

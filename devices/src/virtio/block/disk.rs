// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! State that all queues of a disk share, and the owner of one queue's I/O.

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

/// State that all queues of a disk share.
pub(super) struct Disk {
    /// Name of the disk in logs and thread names.
    pub(super) id: String,
    pub(super) image: Arc<Image>,
    /// Serial number that the guest reads.
    pub(super) serial: [u8; ID_BYTES],
    pub(super) counts: Counts,
    pub(super) mode: IoMode,
    /// Rate limiter, which several disks can share. `None` means no limit.
    pub(super) limiter: Option<Arc<RateLimiter>>,
    /// Host CPUs for the queues' threads. The key is the queue's index. If a queue has no entry, its thread may run on any CPU.
    pub(super) affinity: BTreeMap<u16, HostCpus>,
}

/// Owner of the I/O that the host kernel does in guest memory for one queue. The owner cancels the I/O when the guest memory is unmapped.
pub(super) struct Owner {
    queue: u16,
    interrupt: Arc<dyn Interrupt>,
    /// Event that wakes the queue's thread.
    doorbell: EventFd,
    /// Numbers of the transfers to cancel.
    unwanted: Mutex<Vec<u64>>,
    any: AtomicBool,
}

impl Owner {
    /// Creates the owner for `queue`. `doorbell` wakes the queue's thread.
    pub(super) fn new(queue: u16, interrupt: Arc<dyn Interrupt>, doorbell: EventFd) -> Self {
        Self { queue, interrupt, doorbell, unwanted: Mutex::default(), any: AtomicBool::new(false) }
    }

    /// Returns the numbers of the transfers to cancel, and clears the list.
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
        // The write fails only if the eventfd's counter is full. A full counter wakes the thread too.
        let _ = self.doorbell.write(1);
    }

    fn give_up(&self) {
        self.interrupt.failed(&DeviceError::Stuck { queue: self.queue });
    }
}

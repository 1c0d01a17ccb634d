// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tracks accesses of the host kernel to guest memory, such as asynchronous reads of a disk's file.
//!
//! The kernel continues such an operation even if this process unmaps the memory. So an UNMAP must first cancel the device's operations in
//! the range, and wait for their end.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use crate::host_range::{DeviceRange, HostRange};
use crate::peer_timeouts::{self, Peer};
use crate::sync::lock;

/// Maximum time that one guest access to the virtio-iommu waits for cancelled I/O of the host kernel. The limit applies to all UNMAPs of
/// the access together. A vCPU may wait this long, with interrupts off in the guest.
pub const IO_DEADLINE: Duration = Duration::from_secs(5);
/// Time that each UNMAP may wait, even if earlier waits have used up the deadline. This time suffices for I/O that can be cancelled,
/// because such I/O ends immediately.
const GRACE: Duration = Duration::from_millis(100);

/// Ranges of this process's memory that an operation uses. Most operations have only one range.
pub(super) type HostRanges = SmallVec<[HostRange; 2]>;

/// First and last IOVA of each part of an operation.
pub(super) type Parts = SmallVec<[(u64, u64); 2]>;

/// Part of a device that starts operations of the host kernel, and can cancel these operations.
pub trait IoOwner: Send + Sync {
    /// Asks the kernel to end the operation with this [`HostIo::number`]. A vCPU thread calls this function with the engine locked, so the
    /// function must not wait. The operation may have ended already.
    fn cancel(&self, number: u64);
    /// Makes the device fail until its driver resets it, because an operation did not end in time. This function must not wait either.
    fn give_up(&self);
}

/// Operation in progress.
struct Operation {
    number: u64,
    parts: Parts,
    owner: Arc<dyn IoOwner>,
    /// Keeps device memory mapped in this process, because the device may be removed before the operation ends.
    _devices: Vec<DeviceRange>,
    /// True if the owner was asked to end the operation.
    is_cancelled: bool,
    /// True if this operation, or another operation of its owner, did not end in time. No UNMAP waits for this operation any more.
    is_given_up: bool,
}

impl Operation {
    fn touches(&self, first: u64, last: u64) -> bool {
        self.parts.iter().any(|(start, end)| *start <= last && first <= *end)
    }
}

#[derive(Default)]
pub(super) struct Running {
    next: u64,
    operations: Vec<Operation>,
}

/// Implementation of the wait for the end of an operation. Tests use another implementation, which records the waits.
pub(super) trait Waiter: Send + Sync {
    /// Waits until an operation ends, but not longer than `most`. Returns the duration of the wait.
    fn wait<'r>(
        &self,
        running: MutexGuard<'r, Running>,
        ended: &Condvar,
        most: Duration,
    ) -> (MutexGuard<'r, Running>, Duration);
}

/// Waiter that waits in real time.
struct ByClock;

impl Waiter for ByClock {
    fn wait<'r>(
        &self,
        running: MutexGuard<'r, Running>,
        ended: &Condvar,
        most: Duration,
    ) -> (MutexGuard<'r, Running>, Duration) {
        let began = Instant::now();
        let running = ended.wait_timeout(running, most).unwrap_or_else(PoisonError::into_inner).0;
        (running, began.elapsed())
    }
}

/// Running operations that use the mappings of one [`DmaTable`](super::DmaTable).
pub(super) struct Operations {
    running: Mutex<Running>,
    ended: Condvar,
    waiter: Box<dyn Waiter>,
}

impl Default for Operations {
    fn default() -> Self {
        Self::with_waiter(Box::new(ByClock))
    }
}

impl Operations {
    /// Returns an empty set of operations, which uses `waiter` to wait for the end of an operation.
    pub(super) fn with_waiter(waiter: Box<dyn Waiter>) -> Self {
        Self { running: Mutex::default(), ended: Condvar::new(), waiter }
    }

    /// Records an operation. Returns its number.
    pub(super) fn begin(&self, parts: Parts, owner: Arc<dyn IoOwner>, devices: Vec<DeviceRange>) -> u64 {
        let mut running = lock(&self.running);
        let number = running.next;
        running.next += 1;
        running.operations.push(Operation {
            number,
            parts,
            owner,
            _devices: devices,
            is_cancelled: false,
            is_given_up: false,
        });
        number
    }

    fn end(&self, number: u64) {
        let mut running = lock(&self.running);
        let place = running.operations.iter().position(|operation| operation.number == number);
        let ended = place.map(|place| running.operations.swap_remove(place));
        drop(running);
        drop(ended);
        self.ended.notify_all();
    }

    /// True if any operation overlaps the IOVAs `[first, last]`.
    pub(super) fn touch(&self, first: u64, last: u64) -> bool {
        lock(&self.running).operations.iter().any(|operation| operation.touches(first, last))
    }

    /// Marks all operations that overlap `[first, last]` as cancelled. Returns the number and owner of each operation that was not marked
    /// before. The caller must call [`IoOwner::cancel`] for these operations while the lock is free.
    fn to_cancel(&self, first: u64, last: u64) -> Vec<(u64, Arc<dyn IoOwner>)> {
        let mut running = lock(&self.running);
        let wanted = |operation: &&mut Operation| !operation.is_cancelled && operation.touches(first, last);
        let touching = running.operations.iter_mut().filter(wanted);
        touching
            .map(|operation| {
                operation.is_cancelled = true;
                (operation.number, operation.owner.clone())
            })
            .collect()
    }

    /// Cancels all operations that overlap `[first, last]`, and waits for their end.
    ///
    /// Returns false if an operation still runs after `limit`. In this case this function calls [`IoOwner::give_up`] for the operation's
    /// owner. Later calls do not wait for any operation that this owner has begun so far. All waits within one
    /// [`Operation`](peer_timeouts::Operation) share the limit. But each call may wait for at least [`GRACE`], or for `limit` if `limit` is
    /// shorter. The caller must ensure that no new operation can begin in the range.
    pub(super) fn end_all(&self, first: u64, last: u64, limit: Duration) -> bool {
        for (number, owner) in self.to_cancel(first, last) {
            owner.cancel(number);
        }
        let mut left = limit.saturating_sub(peer_timeouts::Operation::waited(Peer::HostKernel)).max(limit.min(GRACE));
        let mut running = lock(&self.running);
        loop {
            let touching = || running.operations.iter().filter(|operation| operation.touches(first, last));
            if touching().all(|operation| operation.is_given_up) {
                return touching().next().is_none();
            }
            if left.is_zero() {
                break;
            }
            let (after, waited) = self.waiter.wait(running, &self.ended, left);
            running = after;
            peer_timeouts::Operation::note(Peer::HostKernel, waited);
            left = left.saturating_sub(waited);
        }
        let late = give_up(&mut running, first, last);
        drop(running);
        late.iter().for_each(|owner| owner.give_up());
        false
    }
}

/// Finds the owners of operations that overlap `[first, last]` and are not given up yet. Marks all operations of these owners as given up.
/// The result contains each owner once.
fn give_up(running: &mut Running, first: u64, last: u64) -> Vec<Arc<dyn IoOwner>> {
    let mut late: Vec<Arc<dyn IoOwner>> = Vec::new();
    let touching =
        running.operations.iter().filter(|operation| operation.touches(first, last) && !operation.is_given_up);
    for operation in touching {
        if !late.iter().any(|owner| Arc::ptr_eq(owner, &operation.owner)) {
            late.push(operation.owner.clone());
        }
    }
    for operation in &mut running.operations {
        operation.is_given_up |= late.iter().any(|owner| Arc::ptr_eq(owner, &operation.owner));
    }
    late
}

/// Operation of the host kernel on guest memory. The memory stays mapped for the device until this value is dropped. Drop the value when
/// the operation has ended.
pub struct HostIo {
    ranges: HostRanges,
    /// Record of the operation, for a device behind the virtio-iommu. Without the virtio-iommu no record is necessary, because RAM is never
    /// unmapped.
    noted: Option<(Arc<Operations>, u64)>,
}

impl HostIo {
    pub(super) fn new(ranges: HostRanges, noted: Option<(Arc<Operations>, u64)>) -> Self {
        Self { ranges, noted }
    }

    /// Returns the memory ranges in this process, in the order of the requested IOVAs.
    pub fn ranges(&self) -> &[HostRange] {
        &self.ranges
    }

    /// Returns the number of the operation for [`IoOwner::cancel`]. Returns 0 if the operation is never cancelled.
    pub fn number(&self) -> u64 {
        self.noted.as_ref().map_or(0, |(_, number)| *number)
    }
}

impl Drop for HostIo {
    fn drop(&mut self) {
        if let Some((operations, number)) = &self.noted {
            operations.end(*number);
        }
    }
}

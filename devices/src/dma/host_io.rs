// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! I/O of the host's kernel into guest memory, such as an asynchronous read of a disk's file: what of it is under way.
//!
//! The kernel goes on with such an operation whatever this process does with its mappings. So who takes memory away from
//! a device must know of it, have it cancelled and wait for its end.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use crate::host_range::{DeviceRange, HostRange};
use crate::patience::{self, Peer};
use crate::sync::lock;

/// How long one access of a guest waits in all for I/O of the host's kernel that was asked to end, however many UNMAPs it makes. A vCPU
/// of the guest waits that long, with interrupts off.
pub const IO_DEADLINE: Duration = Duration::from_secs(5);
/// Time of an owner once others have used up the deadline: I/O that can be cancelled ends at once.
const GRACE: Duration = Duration::from_millis(100);

/// Where an operation's memory lies in this process. Few have more than one place.
pub(super) type HostRanges = SmallVec<[HostRange; 2]>;

/// First and last IOVA of an operation's parts.
pub(super) type Parts = SmallVec<[(u64, u64); 2]>;

/// Whoever runs I/O of the host's kernel for a device.
pub trait IoOwner: Send + Sync {
    /// Asks the kernel to end this operation, the number that [`HostIo::number`] told. Comes on the thread of a vCPU, with
    /// the engine locked: it must not wait. The operation may have ended already.
    fn cancel(&self, number: u64);
    /// The operation did not end in time: the device is to fail until its driver resets it. Must not wait either.
    fn give_up(&self);
}

/// An operation under way.
struct Operation {
    number: u64,
    parts: Parts,
    owner: Arc<dyn IoOwner>,
    /// Keeps memory of devices mapped in this process: a device may leave though the operation does not end.
    _devices: Vec<DeviceRange>,
    /// Its owner was asked to end it.
    is_cancelled: bool,
    /// It did not end in time, or another one of its owner did not. It is not waited for any more.
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

/// Waits until operations end. Tests count the waits.
pub(super) trait Waiter: Send + Sync {
    /// Waits until one ends, or for `most`. Returns how long it waited.
    fn wait<'r>(
        &self,
        running: MutexGuard<'r, Running>,
        ended: &Condvar,
        most: Duration,
    ) -> (MutexGuard<'r, Running>, Duration);
}

/// Waits by the clock.
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

/// The operations of one table.
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
    /// None yet, waited for by `waiter`.
    pub(super) fn with_waiter(waiter: Box<dyn Waiter>) -> Self {
        Self { running: Mutex::default(), ended: Condvar::new(), waiter }
    }

    /// Notes an operation; returns its number.
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

    /// Whether any touches `[first, last]`.
    pub(super) fn touch(&self, first: u64, last: u64) -> bool {
        lock(&self.running).operations.iter().any(|operation| operation.touches(first, last))
    }

    /// Those that touch `[first, last]` and are not cancelled yet, which they are from now on. Their owners are called without the lock.
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

    /// Cancels those that touch `[first, last]`, and waits for their end. Returns `false` if one goes on after `limit`. Then its
    /// owner is given up, and no operation of that owner is waited for any more. Waits within one
    /// [`Operation`](patience::Operation) count together. To be called when no other can begin there.
    pub(super) fn end_all(&self, first: u64, last: u64, limit: Duration) -> bool {
        for (number, owner) in self.to_cancel(first, last) {
            owner.cancel(number);
        }
        let mut left = limit.saturating_sub(patience::Operation::waited(Peer::HostKernel)).max(limit.min(GRACE));
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
            patience::Operation::note(Peer::HostKernel, waited);
            left = left.saturating_sub(waited);
        }
        let late = give_up(&mut running, first, last);
        drop(running);
        late.iter().for_each(|owner| owner.give_up());
        false
    }
}

/// Gives up all operations of those owners that have one in `[first, last]`. Returns the owners, each once.
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

/// An operation of the host's kernel on guest memory. Dropping it says that the operation has ended; until then the memory
/// stays mapped for the device.
pub struct HostIo {
    ranges: HostRanges,
    /// Where it is noted, for a device behind the virtio-iommu. RAM itself never goes away.
    noted: Option<(Arc<Operations>, u64)>,
}

impl HostIo {
    pub(super) fn new(ranges: HostRanges, noted: Option<(Arc<Operations>, u64)>) -> Self {
        Self { ranges, noted }
    }

    /// Where the memory lies in this process, in the order of the IOVAs that were asked for.
    pub fn ranges(&self) -> &[HostRange] {
        &self.ranges
    }

    /// By which number [`IoOwner::cancel`] names it; 0 if it never does.
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

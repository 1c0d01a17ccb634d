// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! I/O of the host's kernel into guest memory, such as an asynchronous read of a disk's file: what of it is under way.
//!
//! The kernel goes on with such an operation whatever this process does with its mappings. So who takes memory away from
//! a device must know of it, have it cancelled and wait for its end.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use crate::host_range::{DeviceRange, HostRange};
use crate::sync::lock;

/// How long an UNMAP waits for I/O of the host's kernel that was asked to end. A vCPU of the guest waits that long, with
/// interrupts off.
pub const IO_DEADLINE: Duration = Duration::from_secs(5);

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
    /// It did not end in time. Nobody waits for it again.
    is_given_up: bool,
}

impl Operation {
    fn touches(&self, first: u64, last: u64) -> bool {
        self.parts.iter().any(|(start, end)| *start <= last && first <= *end)
    }
}

#[derive(Default)]
struct Running {
    next: u64,
    operations: Vec<Operation>,
}

/// The operations of one table.
#[derive(Default)]
pub(super) struct Operations {
    running: Mutex<Running>,
    ended: Condvar,
}

impl Operations {
    /// Notes an operation; returns its number.
    pub(super) fn begin(&self, parts: Parts, owner: Arc<dyn IoOwner>) -> u64 {
        let mut running = lock(&self.running);
        let number = running.next;
        running.next += 1;
        running.operations.push(Operation { number, parts, owner, is_given_up: false });
        number
    }

    fn end(&self, number: u64) {
        let mut running = lock(&self.running);
        if let Some(place) = running.operations.iter().position(|operation| operation.number == number) {
            running.operations.swap_remove(place);
        }
        drop(running);
        self.ended.notify_all();
    }

    /// Whether any touches `[first, last]`.
    pub(super) fn touch(&self, first: u64, last: u64) -> bool {
        lock(&self.running).operations.iter().any(|operation| operation.touches(first, last))
    }

    /// Those that touch `[first, last]` and are not given up. Their owners are called without the lock.
    fn touching(&self, first: u64, last: u64) -> Vec<(u64, Arc<dyn IoOwner>)> {
        let running = lock(&self.running);
        let is_wanted = |operation: &&Operation| !operation.is_given_up && operation.touches(first, last);
        let touching = running.operations.iter().filter(is_wanted);
        touching.map(|operation| (operation.number, operation.owner.clone())).collect()
    }

    /// Has those that touch `[first, last]` cancelled, and waits for their end. `false` if one goes on after `limit`: its
    /// owner was told. One that was waited for in vain before is neither cancelled nor waited for again. To be called when no
    /// other can begin there.
    pub(super) fn end_all(&self, first: u64, last: u64, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        for (number, owner) in self.touching(first, last) {
            owner.cancel(number);
        }
        let mut running = lock(&self.running);
        loop {
            let touching = || running.operations.iter().filter(|operation| operation.touches(first, last));
            if touching().all(|operation| operation.is_given_up) {
                return touching().next().is_none();
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            running = self.ended.wait_timeout(running, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let touching = running.operations.iter_mut().filter(|operation| operation.touches(first, last));
        let late: Vec<_> = touching
            .map(|operation| {
                operation.is_given_up = true;
                operation.owner.clone()
            })
            .collect();
        drop(running);
        late.iter().for_each(|owner| owner.give_up());
        false
    }
}

/// An operation of the host's kernel on guest memory. Dropping it says that the operation has ended; until then the memory
/// stays mapped for the device.
pub struct HostIo {
    ranges: HostRanges,
    /// Where it is noted, for a device behind the virtio-iommu. RAM itself never goes away.
    noted: Option<(Arc<Operations>, u64)>,
    /// Keeps memory of devices mapped in this process: a device may leave though the operation does not end.
    _devices: Vec<DeviceRange>,
}

impl HostIo {
    pub(super) fn new(
        ranges: HostRanges,
        noted: Option<(Arc<Operations>, u64)>,
        devices: Vec<DeviceRange>,
    ) -> Self {
        Self { ranges, noted, _devices: devices }
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

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Pinning of threads to CPUs of the host.
//!
//! A thread is pinned before its system calls are filtered. So no role needs sched_setaffinity(2), and no thread can change its CPUs later.

use std::cell::Cell;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use thiserror::Error;

thread_local! {
    /// Affinity of this thread before it was pinned. Threads that this thread starts get this affinity.
    static BEFORE: Cell<Option<CpuSet>> = const { Cell::new(None) };
}

/// Reason why a thread cannot be pinned to its CPUs.
#[derive(Debug, Error)]
pub enum PinError {
    /// One of the CPUs cannot be used.
    #[error("cannot use CPU {0} of the host: the CPU must be online, and in Cpus_allowed_list of /proc/self/status")]
    Missing(u32),
    /// The host kernel returned another error.
    #[error("cannot start a thread on the configured CPUs of the host: {0}")]
    Host(io::Error),
}

impl From<PinError> for io::Error {
    fn from(error: PinError) -> Self {
        match error {
            PinError::Host(error) => error,
            missing @ PinError::Missing(_) => Self::new(io::ErrorKind::NotFound, missing),
        }
    }
}

/// Non-empty set of host CPUs for a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostCpus(pub(super) CpuSet);

impl HostCpus {
    /// Creates a set with these CPU numbers.
    ///
    /// # Errors
    /// A number exceeds the capacity of the set.
    pub fn new(numbers: impl IntoIterator<Item = u32>) -> Result<Self, PinError> {
        let mut set = CpuSet::new();
        for number in numbers {
            let place = usize::try_from(number).ok().filter(|place| *place < CpuSet::MAX_CPU);
            set.set(place.ok_or(PinError::Missing(number))?);
        }
        Ok(Self(set))
    }

    /// Pins this thread to the CPUs of the set.
    fn hold(self) -> Result<(), PinError> {
        let host = |error: rustix::io::Errno| PinError::Host(error.into());
        let set = sched_setaffinity(None, &self.0);
        if set.is_err_and(|error| error != rustix::io::Errno::INVAL) {
            return set.map_err(host);
        }
        // The kernel ignores CPUs of the set that cannot be used. The call fails if the set has no usable CPU.
        let got = if set.is_ok() { sched_getaffinity(None).map_err(host)? } else { CpuSet::new() };
        let missing = (0..CpuSet::MAX_CPU).find(|cpu| self.0.is_set(*cpu) && !got.is_set(*cpu));
        match missing.map(u32::try_from) {
            Some(Ok(cpu)) => Err(PinError::Missing(cpu)),
            _ => set.map_err(host),
        }
    }
}

/// Host CPUs of a thread that is about to start.
pub(super) struct Placement {
    /// CPUs to pin the thread to, and the channel that reports the result to the requester.
    only: Option<(HostCpus, Sender<Result<(), PinError>>)>,
    before: Option<CpuSet>,
}

impl Placement {
    /// Creates a placement on `cpus`. With `None`, the thread is not pinned. The receiver gets the result of pinning.
    pub(super) fn new(cpus: Option<HostCpus>) -> (Self, Option<Receiver<Result<(), PinError>>>) {
        let before = BEFORE.get();
        let Some(cpus) = cpus else { return (Self { only: None, before }, None) };
        let (sender, receiver) = channel();
        (Self { only: Some((cpus, sender)), before }, Some(receiver))
    }

    /// Applies the placement to this new thread. Returns false if the thread cannot be pinned. The thread must then end.
    pub(super) fn take(self) -> bool {
        let Some((cpus, sender)) = self.only else {
            // This thread inherited the affinity of the thread that started it. Ignore an error, because a thread with this affinity is
            // slower but still correct.
            let _ = self.before.map(|before| sched_setaffinity(None, &before));
            return true;
        };
        BEFORE.set(self.before.or_else(|| sched_getaffinity(None).ok()));
        let held = cpus.hold();
        let is_held = held.is_ok();
        // Ignore an error. The requester waits for the result, so the channel is open.
        let _ = sender.send(held);
        is_held
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Threads that run on some CPUs of the host only.
//!
//! A thread takes its place before its calls are filtered: none can leave it later, and no role needs the call.

use std::cell::Cell;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use thiserror::Error;

thread_local! {
    /// Where this thread was to run before it was held to some CPUs. Threads that it starts run there, not where it does.
    static BEFORE: Cell<Option<CpuSet>> = const { Cell::new(None) };
}

/// Why a thread does not run on the CPUs that it is to.
#[derive(Debug, Error)]
pub enum PinError {
    /// One of them cannot be used.
    #[error("CPU {0} of the host is not there, or this program may not use it")]
    Missing(u32),
    /// The host did not do it.
    #[error("holding a thread to CPUs of the host: {0}")]
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

/// CPUs of the host, one at least for a thread to run on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostCpus(pub(super) CpuSet);

impl HostCpus {
    /// CPUs of these numbers.
    ///
    /// # Errors
    /// A number that is beyond those which a set can hold.
    pub fn new(numbers: impl IntoIterator<Item = u32>) -> Result<Self, PinError> {
        let mut set = CpuSet::new();
        for number in numbers {
            let place = usize::try_from(number).ok().filter(|place| *place < CpuSet::MAX_CPU);
            set.set(place.ok_or(PinError::Missing(number))?);
        }
        Ok(Self(set))
    }

    /// Holds this thread to them.
    fn hold(self) -> Result<(), PinError> {
        let host = |error: rustix::io::Errno| PinError::Host(error.into());
        let set = sched_setaffinity(None, &self.0);
        if set.is_err_and(|error| error != rustix::io::Errno::INVAL) {
            return set.map_err(host);
        }
        // The kernel forgets those that cannot be used, and refuses where none is left.
        let got = if set.is_ok() { sched_getaffinity(None).map_err(host)? } else { CpuSet::new() };
        let missing = (0..CpuSet::MAX_CPU).find(|cpu| self.0.is_set(*cpu) && !got.is_set(*cpu));
        match missing.map(u32::try_from) {
            Some(Ok(cpu)) => Err(PinError::Missing(cpu)),
            _ => set.map_err(host),
        }
    }
}

/// Where a thread that starts is to run.
pub(super) struct Placement {
    /// Only there, and who waits to learn whether it does.
    only: Option<(HostCpus, Sender<Result<(), PinError>>)>,
    before: Option<CpuSet>,
}

impl Placement {
    /// On these CPUs, or wherever threads of this process do; and what tells whether it is so.
    pub(super) fn new(cpus: Option<HostCpus>) -> (Self, Option<Receiver<Result<(), PinError>>>) {
        let before = BEFORE.get();
        let Some(cpus) = cpus else { return (Self { only: None, before }, None) };
        let (tell, told) = channel();
        (Self { only: Some((cpus, tell)), before }, Some(told))
    }

    /// Has this thread, which starts, run there. It is to end where that cannot be.
    pub(super) fn take(self) -> bool {
        let Some((cpus, tell)) = self.only else {
            // The thread that started this one handed its own place down. Where that cannot be undone, it is slower, no less right.
            let _ = self.before.map(|before| sched_setaffinity(None, &before));
            return true;
        };
        BEFORE.set(self.before.or_else(|| sched_getaffinity(None).ok()));
        let held = cpus.hold();
        let is_held = held.is_ok();
        // Whoever asked waits for it.
        let _ = tell.send(held);
        is_held
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Interruption of long requests while a thread waits. Some requests take long, because the host pins gigabytes of memory page by page.
//!
//! A large range is mapped in steps. Between two steps, the engine checks whether the VMM wants to stop its vCPUs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Handle to interrupt the mapping in progress, from any thread.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<Flags>);

#[derive(Debug, Default)]
struct Flags {
    /// True if a thread waits for the engine.
    wanted: AtomicBool,
    /// True if the current request can be interrupted.
    allowed: AtomicBool,
    /// True if a request was interrupted.
    happened: AtomicBool,
}

impl Interrupt {
    /// If `wanted` is true, interrupts long requests until the next call with false. The engine then interrupts MAP, MAP_LIST and
    /// ATTACH requests that take more than one step. A write of 1 to `bypass` is interrupted in the same way, and leaves `bypass`
    /// unchanged. If a DETACH or a device reset leaves an endpoint in bypass mode, the engine maps RAM for the endpoint later.
    pub fn want(&self, wanted: bool) {
        self.0.wanted.store(wanted, Ordering::Release);
    }
}

/// Division of long mappings into steps.
#[derive(Clone, Debug)]
pub(crate) struct Steps {
    interrupt: Interrupt,
    /// Maximum bytes of a step.
    size: u64,
}

impl Steps {
    pub(crate) fn new(size: u64) -> Self {
        Self { interrupt: Interrupt::default(), size }
    }

    /// Returns the handle that interrupts mappings.
    pub(crate) fn interrupt(&self) -> Interrupt {
        self.interrupt.clone()
    }

    /// True if a range of `len` bytes is mapped in steps.
    pub(crate) fn are_for(&self, len: u64) -> bool {
        len > self.size
    }

    /// Returns the size in bytes of the step at `iova`, if `len` bytes are left. Steps end at multiples of their size, as large pages do.
    pub(crate) fn len_at(&self, iova: u64, len: u64) -> u64 {
        (self.size - iova % self.size).min(len)
    }

    /// Allows or forbids interruption from now on. Returns the previous setting.
    pub(crate) fn set_allowed(&self, allowed: bool) -> bool {
        // Only the engine writes this flag. So a load and a store are enough, instead of an atomic exchange.
        let flag = &self.interrupt.0.allowed;
        let before = flag.load(Ordering::Relaxed);
        flag.store(allowed, Ordering::Relaxed);
        before
    }

    /// True if the request must stop here. In that case, the interruption is recorded.
    pub(crate) fn end_here(&self) -> bool {
        let flags = &self.interrupt.0;
        let ends = flags.allowed.load(Ordering::Relaxed) && flags.wanted.load(Ordering::Acquire);
        if ends {
            flags.happened.store(true, Ordering::Relaxed);
        }
        ends
    }

    /// True if a request was interrupted since the last [`take_happened`](Self::take_happened).
    pub(crate) fn happened(&self) -> bool {
        self.interrupt.0.happened.load(Ordering::Relaxed)
    }

    /// Returns the same as [`happened`](Self::happened), and clears the record.
    pub(crate) fn take_happened(&self) -> bool {
        let happened = self.happened();
        if happened {
            self.interrupt.0.happened.store(false, Ordering::Relaxed);
        }
        happened
    }
}

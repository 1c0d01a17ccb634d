// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Requests that take long are left undone where somebody waits: to map gigabytes the host pins page after page.
//!
//! What is mapped at once is mapped in pieces, and between two of them the engine looks whether the VMM wants its vCPUs to stop.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Has an engine leave what it maps undone, from whichever thread.
#[derive(Clone, Debug, Default)]
pub struct Interrupt(Arc<Flags>);

#[derive(Debug, Default)]
struct Flags {
    /// Somebody waits.
    wanted: AtomicBool,
    /// What is at hand can be left undone.
    allowed: AtomicBool,
    /// It was.
    happened: AtomicBool,
}

impl Interrupt {
    /// As long as it is wanted, MAP and ATTACH requests for more than a piece are left undone, and `bypass` cannot be turned on for as much.
    /// What a DETACH or a reset of the device leaves in bypass mode reaches nothing until later.
    pub fn want(&self, wanted: bool) {
        self.0.wanted.store(wanted, Ordering::Release);
    }
}

/// How address spaces map what is long.
#[derive(Clone, Debug)]
pub(crate) struct Pieces {
    interrupt: Interrupt,
    /// Most bytes of a piece.
    size: u64,
}

impl Pieces {
    pub(crate) fn new(size: u64) -> Self {
        Self { interrupt: Interrupt::default(), size }
    }

    /// What interrupts them.
    pub(crate) fn interrupt(&self) -> Interrupt {
        self.interrupt.clone()
    }

    /// Whether so many bytes are mapped in pieces.
    pub(crate) fn are_for(&self, len: u64) -> bool {
        len > self.size
    }

    /// Bytes of the piece that begins at `iova`, of `len` that are left. Pieces end at multiples of their size, as large pages do.
    pub(crate) fn len_at(&self, iova: u64, len: u64) -> u64 {
        (self.size - iova % self.size).min(len)
    }

    /// From now on what is at hand may be left undone, or not. Returns what was before.
    pub(crate) fn set_allowed(&self, allowed: bool) -> bool {
        // Only the engine writes it: two plain accesses, for each request.
        let flag = &self.interrupt.0.allowed;
        let before = flag.load(Ordering::Relaxed);
        flag.store(allowed, Ordering::Relaxed);
        before
    }

    /// Whether to leave it undone here, which is noted.
    pub(crate) fn end_here(&self) -> bool {
        let flags = &self.interrupt.0;
        let ends = flags.allowed.load(Ordering::Relaxed) && flags.wanted.load(Ordering::Acquire);
        if ends {
            flags.happened.store(true, Ordering::Relaxed);
        }
        ends
    }

    /// Whether something was left undone since this was taken.
    pub(crate) fn happened(&self) -> bool {
        self.interrupt.0.happened.load(Ordering::Relaxed)
    }

    /// The same, and nothing was from now on.
    pub(crate) fn take_happened(&self) -> bool {
        let happened = self.happened();
        if happened {
            self.interrupt.0.happened.store(false, Ordering::Relaxed);
        }
        happened
    }
}

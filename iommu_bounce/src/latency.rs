// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How long requests take, and calls to the host.

use std::time::Instant;

use serde::Serialize;

use crate::histogram::Histogram;
use crate::wire::{Kind, by_kind};

/// How long requests took, by kind, host calls included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RequestLatency {
    /// ATTACH requests.
    pub attach: Histogram,
    /// DETACH requests.
    pub detach: Histogram,
    /// MAP requests.
    pub map: Histogram,
    /// UNMAP requests.
    pub unmap: Histogram,
    /// PROBE requests.
    pub probe: Histogram,
    /// WINDOW_ADD requests.
    pub window_add: Histogram,
    /// WINDOW_DEL requests.
    pub window_del: Histogram,
}

impl RequestLatency {
    pub(crate) fn of(&mut self, kind: Kind) -> &mut Histogram {
        by_kind!(self, kind)
    }
}

/// How long calls to mappers took, failed ones included. One call in eight to each mapper is timed, and those that fail in its place: reading the clock around each
/// would add a fifth to the engine's time for a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HostLatency {
    /// Calls to [`DmaMapper::map`](crate::DmaMapper::map).
    pub map: Histogram,
    /// Calls to [`DmaMapper::unmap`](crate::DmaMapper::unmap).
    pub unmap: Histogram,
}

/// One call in so many is timed.
const EACH: u64 = 8;
/// A typical call is known when so many were timed.
const FEW: u64 = 8;

/// Calls to one mapper, of one kind.
#[derive(Default)]
pub(crate) struct Calls {
    /// All so far.
    count: u64,
    /// One that counts is to be timed: those that do not must not take its turn.
    is_due: bool,
    /// How long those took that were timed and count. One that fails may do so at once, and does not.
    times: Histogram,
    /// Nanoseconds of a typical one: one that had to wait for the CPU says nothing of others. 0 while it is not known.
    pub(crate) typical_ns: u64,
}

impl Calls {
    /// One begins. Returns when, if it is to be timed.
    pub(crate) fn begin(&mut self) -> Option<Instant> {
        self.is_due |= self.count.is_multiple_of(EACH);
        self.count += 1;
        self.is_due.then(Instant::now)
    }

    /// It ended. `all` are those to all mappers.
    pub(crate) fn end(&mut self, began: Option<Instant>, counts: bool, all: &mut Histogram) {
        let Some(took) = began.map(|began| began.elapsed()) else { return };
        all.record(took);
        if counts {
            self.is_due = false;
            self.times.record(took);
            if self.times.count >= FEW {
                self.typical_ns = self.times.quantile_ns(500).max(1);
            }
        }
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Duration of requests and host calls.

use std::time::Instant;

use serde::Serialize;

use crate::histogram::Histogram;
use crate::wire::{Kind, by_kind};

/// Duration of requests by kind, including host calls.
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
    /// MAP_LIST requests.
    pub map_list: Histogram,
}

impl RequestLatency {
    pub(crate) fn of(&mut self, kind: Kind) -> &mut Histogram {
        by_kind!(self, kind)
    }
}

/// Duration of mapper calls, including failed calls. One in eight calls of each mapper is timed. If the timed call fails, the next
/// calls are timed too, until one succeeds. Reading the clock for each call would add a fifth to the engine's time for a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HostLatency {
    /// Calls to [`DmaMapper::map`](crate::DmaMapper::map).
    pub map: Histogram,
    /// Calls to [`DmaMapper::unmap`](crate::DmaMapper::unmap).
    pub unmap: Histogram,
}

/// The engine times one of every `EACH` calls.
const EACH: u64 = 8;
/// Number of timed calls after which the typical duration is known.
const FEW: u64 = 8;

/// Durations of the calls of one kind (map or unmap) to one mapper.
#[derive(Default)]
pub(crate) struct Calls {
    /// Number of calls so far.
    count: u64,
    /// True if the next call must be timed. Stays true until a timed call counts.
    is_due: bool,
    /// Durations of the timed calls that count. A failed call does not count, because it may return before it has done any work.
    times: Histogram,
    /// Median of `times` in nanoseconds, or 0 while unknown. A mean would include calls that had to wait for a CPU, which say nothing about
    /// other calls.
    pub(crate) typical_ns: u64,
}

impl Calls {
    /// Starts a call. Returns the current time if the call must be timed.
    pub(crate) fn begin(&mut self) -> Option<Instant> {
        self.is_due |= self.count.is_multiple_of(EACH);
        self.count += 1;
        self.is_due.then(Instant::now)
    }

    /// Ends a call. `counts` is true if the duration of the call may predict other calls. `all` is the histogram of calls to all mappers.
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

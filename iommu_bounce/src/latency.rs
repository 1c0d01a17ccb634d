// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How long requests take, and calls to the host.

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

/// How long calls to mappers took, failed ones included. One call in eight is timed: reading the clock around each
/// would add a fifth to the engine's time for a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HostLatency {
    /// Calls to [`DmaMapper::map`](crate::DmaMapper::map).
    pub map: Histogram,
    /// Calls to [`DmaMapper::unmap`](crate::DmaMapper::unmap).
    pub unmap: Histogram,
}

impl HostLatency {
    /// Whether the call that follows this many is timed.
    pub(crate) fn is_due(calls: u64) -> bool {
        calls.is_multiple_of(8)
    }
}

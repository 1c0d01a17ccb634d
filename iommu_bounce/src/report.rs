// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! All figures of an engine, per domain and endpoint too.

use serde::Serialize;

use crate::counters::{Counters, RequestCounts};
use crate::histogram::Histogram;
use crate::wire::{Kind, by_kind};
use crate::{DomainId, EndpointId};

/// Requests that concern one domain or endpoint, since it exists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Activity {
    /// Requests by kind.
    pub requests: RequestCounts,
    /// Of these, the ones whose status was not `OK`.
    pub failed: RequestCounts,
    /// How long they took, host calls included.
    pub latency: Histogram,
}

impl Activity {
    pub(crate) fn note(&mut self, kind: Kind, ok: bool, took: std::time::Duration) {
        self.requests.add(kind);
        if !ok {
            self.failed.add(kind);
        }
        self.latency.record(took);
    }
}

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

/// How long calls to mappers took, failed ones included. One in eight is timed: reading the clock around each would cost a
/// fifth of all that the engine does for a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct HostLatency {
    /// Calls to [`DmaMapper::map`](crate::DmaMapper::map).
    pub map: Histogram,
    /// Calls to [`DmaMapper::unmap`](crate::DmaMapper::unmap).
    pub unmap: Histogram,
}

impl HostLatency {
    /// Whether the call after so many is timed.
    pub(crate) fn is_due(calls: u64) -> bool {
        calls.is_multiple_of(8)
    }
}

/// One domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DomainReport {
    /// Its number.
    pub domain: DomainId,
    /// Whether it is a bypass domain.
    pub bypass: bool,
    /// The endpoints that are attached.
    pub endpoints: Vec<EndpointId>,
    /// Address spaces of the host that hold what it maps: so often is it mapped.
    pub address_spaces: usize,
    /// Mappings of the driver's.
    pub mappings: u64,
    /// Bytes of guest RAM that it maps.
    pub mapped_bytes: u64,
    /// Bytes of its window.
    pub window_bytes: u64,
    /// ATTACH, DETACH, MAP, UNMAP and window requests for it.
    #[serde(flatten)]
    pub activity: Activity,
}

/// One endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EndpointReport {
    /// Its ID.
    pub endpoint: EndpointId,
    /// The domain that it is attached to.
    pub domain: Option<DomainId>,
    /// Whether it is in bypass mode.
    pub bypass: bool,
    /// Bytes of guest RAM that it reaches.
    pub mapped_bytes: u64,
    /// Bytes of windows that it reaches, parked chunks included.
    pub window_bytes: u64,
    /// Of these, the parked ones: no domain's, as its domain ended, and kept mapped for the next one after a reset of the VM.
    pub parked_bytes: u64,
    /// Bytes that this keeps the host from moving or giving to others: RAM and windows together.
    pub pinned_bytes: u64,
    /// ATTACH, DETACH and PROBE requests for it.
    #[serde(flatten)]
    pub activity: Activity,
}

/// All figures of an engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The totals.
    #[serde(flatten)]
    pub counters: Counters,
    /// How long requests took.
    pub latency: RequestLatency,
    /// How long the host's part took.
    pub host: HostLatency,
    /// Every domain that exists.
    pub domains: Vec<DomainReport>,
    /// Every endpoint.
    pub endpoints: Vec<EndpointReport>,
}

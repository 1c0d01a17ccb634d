// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! All figures of an engine, also of each domain and endpoint.

use serde::Serialize;

use crate::activity::Activity;
use crate::counters::Counters;
use crate::latency::{HostLatency, RequestLatency};
use crate::{DomainId, EndpointId};

/// One domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DomainReport {
    /// Its number.
    pub domain: DomainId,
    /// Whether it is a bypass domain.
    pub bypass: bool,
    /// The endpoints that are attached.
    pub endpoints: Vec<EndpointId>,
    /// Address spaces of the host that hold its mappings. Each mapping is made in each of them.
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
    /// Of these, parked chunks: their domain has ended, and they stay mapped for the next one after a reset of the VM.
    pub parked_bytes: u64,
    /// Bytes that the host's kernel has pinned for it: RAM and windows together. 0 if the endpoint is no device of the host.
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

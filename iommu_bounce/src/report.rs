// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Report on an engine, with counters and durations for the engine, each domain and each endpoint.

use serde::Serialize;

use crate::activity::Activity;
use crate::counters::Counters;
use crate::latency::{HostLatency, RequestLatency};
use crate::{DomainId, EndpointId};

/// Mapped memory and request counts of one domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DomainReport {
    /// Domain number.
    pub domain: DomainId,
    /// True for a bypass domain.
    pub bypass: bool,
    /// Attached endpoints.
    pub endpoints: Vec<EndpointId>,
    /// Number of host address spaces that hold the domain's mappings. Each mapping exists in each of these address spaces.
    pub address_spaces: usize,
    /// Number of mappings that the driver made.
    pub mappings: u64,
    /// Bytes of guest RAM that the domain maps.
    pub mapped_bytes: u64,
    /// Bytes of the domain's window.
    pub window_bytes: u64,
    /// ATTACH, DETACH, MAP, UNMAP and window requests for the domain.
    #[serde(flatten)]
    pub activity: Activity,
}

/// Mapped memory and request counts of one endpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct EndpointReport {
    /// Endpoint ID.
    pub endpoint: EndpointId,
    /// Domain that the endpoint is attached to.
    pub domain: Option<DomainId>,
    /// True if the endpoint is in bypass mode.
    pub bypass: bool,
    /// Bytes of guest RAM that the endpoint can access.
    pub mapped_bytes: u64,
    /// Bytes of windows that the endpoint can access, including parked chunks.
    pub window_bytes: u64,
    /// Bytes of parked chunks among `window_bytes`. The domain of these chunks has ended. The chunks stay mapped for the next domain after
    /// a reset of the VM.
    pub parked_bytes: u64,
    /// Bytes that the host kernel has pinned for the endpoint: RAM and windows together. 0 if the endpoint is not a host device.
    pub pinned_bytes: u64,
    /// ATTACH, DETACH and PROBE requests for the endpoint.
    #[serde(flatten)]
    pub activity: Activity,
}

/// Report on an engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Counters of the engine.
    #[serde(flatten)]
    pub counters: Counters,
    /// Duration of requests.
    pub latency: RequestLatency,
    /// Duration of host calls.
    pub host: HostLatency,
    /// All existing domains.
    pub domains: Vec<DomainReport>,
    /// All endpoints.
    pub endpoints: Vec<EndpointReport>,
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Reports on the bounce windows and their domains.

use std::ops::RangeInclusive;

use serde::Serialize;

use super::Engine;
use crate::backend::Permissions;
use crate::{DomainId, EndpointId};

/// Window of one domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DomainWindow {
    /// Number of the domain.
    pub domain: DomainId,
    /// Endpoints attached to the domain.
    pub endpoints: Vec<EndpointId>,
    /// Number of chunks that the domain's devices may only read.
    pub read_chunks: u64,
    /// Number of chunks that the domain's devices may only write.
    pub write_chunks: u64,
    /// Number of chunks that the domain's devices may read and write.
    pub read_write_chunks: u64,
}

impl Engine {
    /// Returns the windows of all domains, in the order of domain numbers. A domain without chunks is included.
    pub fn domain_windows(&self) -> Vec<DomainWindow> {
        let window = |(&domain, state): (&DomainId, &crate::domain::Domain)| {
            let count =
                |permissions| state.chunks.values().filter(|chunk| chunk.permissions == permissions).count() as u64;
            DomainWindow {
                domain,
                endpoints: state.endpoints.clone(),
                read_chunks: count(Permissions::READ),
                write_chunks: count(Permissions::WRITE),
                read_write_chunks: count(Permissions::READ | Permissions::WRITE),
            }
        };
        self.domains.iter().map(window).collect()
    }

    /// Returns the maximum bytes of window memory over all domains, or 0 without bounce windows.
    pub fn budget(&self) -> u64 {
        self.windows.as_ref().map_or(0, |windows| windows.config.budget)
    }

    /// Returns the IOVAs of the window aperture, if the device has windows.
    pub fn window_aperture(&self) -> Option<RangeInclusive<u64>> {
        self.windows.as_ref().map(|windows| windows.config.aperture.clone())
    }

    /// Returns the advice to the driver: the maximum size in bytes of a DMA that the driver should copy. 0 leaves the decision to the
    /// driver.
    pub fn threshold(&self) -> u32 {
        self.windows.as_ref().map_or(0, |windows| windows.config.threshold)
    }

    /// Returns the same advice for DMA that devices write. 0 stands for [`threshold`](Self::threshold).
    pub fn threshold_write(&self) -> u32 {
        self.windows.as_ref().map_or(0, |windows| windows.config.threshold_write)
    }

    /// Returns the size of a chunk in bytes, or 0 without bounce windows.
    pub fn chunk_size(&self) -> u64 {
        self.windows.as_ref().map_or(0, |windows| windows.chunk_size())
    }
}

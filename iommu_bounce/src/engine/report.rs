// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Figures about the windows of domains.

use std::ops::RangeInclusive;

use serde::Serialize;

use super::Engine;
use crate::backend::Permissions;
use crate::{DomainId, EndpointId};

/// The window of one domain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DomainWindow {
    /// The domain.
    pub domain: DomainId,
    /// The endpoints attached to it.
    pub endpoints: Vec<EndpointId>,
    /// Chunks that its devices may only read.
    pub read_chunks: u64,
    /// Chunks that its devices may only write.
    pub write_chunks: u64,
    /// Chunks that its devices may read and write.
    pub read_write_chunks: u64,
}

impl Engine {
    /// The windows of all domains, in the order of their numbers; a domain that has none yet is there too.
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

    /// Bytes of window memory that all domains may use; 0 without bounce windows.
    pub fn budget(&self) -> u64 {
        self.windows.as_ref().map_or(0, |windows| windows.config.budget)
    }

    /// IOVAs of the aperture of bounce windows, if the device has windows.
    pub fn window_aperture(&self) -> Option<RangeInclusive<u64>> {
        self.windows.as_ref().map(|windows| windows.config.aperture.clone())
    }

    /// Advice to the driver: the size in bytes at or below which it should copy; 0 leaves it to the driver.
    pub fn threshold(&self) -> u32 {
        self.windows.as_ref().map_or(0, |windows| windows.config.threshold)
    }

    /// Bytes of a chunk; 0 without bounce windows.
    pub fn chunk_size(&self) -> u64 {
        self.windows.as_ref().map_or(0, |windows| windows.chunk_size())
    }
}

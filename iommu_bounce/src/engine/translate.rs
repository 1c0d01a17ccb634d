// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Translation for devices that the VMM emulates, and faults of all endpoints.

use std::time::Instant;

use super::Engine;
use crate::EndpointId;
use crate::backend::Permissions;
use crate::domain::Domain;
use crate::fault::{Fault, FaultReason};

/// Memory that an IOVA is mapped to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Guest RAM at this guest-physical address.
    Ram(u64),
    /// A chunk of window memory.
    Chunk {
        /// Index of the chunk in its store.
        index: u32,
        /// Offset from the start of the chunk, in bytes.
        offset: u64,
    },
}

/// Result of a translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translation {
    /// Memory at the IOVA.
    pub target: Target,
    /// Number of contiguous bytes from the IOVA on, at least 1.
    pub len: u64,
}

impl Engine {
    /// Translates an access of a device that the VMM emulates. For other devices, a [`DmaMapper`](crate::DmaMapper) translates.
    /// The mapping must allow all of `access`. An access that is longer than [`Translation::len`] takes several calls.
    ///
    /// # Errors
    /// The error is the fault, which this call also reports to the driver.
    pub fn translate(&mut self, endpoint: EndpointId, iova: u64, access: Permissions) -> Result<Translation, Fault> {
        self.look_up(endpoint, iova, access).map_err(|reason| {
            let fault = Fault { reason, endpoint, address: Some(iova), access };
            self.report_fault(fault);
            fault
        })
    }

    fn look_up(&self, endpoint: EndpointId, iova: u64, access: Permissions) -> Result<Translation, FaultReason> {
        let endpoint = self.endpoints.get(&endpoint).ok_or(FaultReason::Unknown)?;
        let domain = match endpoint.domain {
            Some(domain) => self.domains.get(&domain),
            None => self.bypass.then_some(&self.identity),
        };
        let domain = domain.ok_or(FaultReason::Domain)?;
        let found = self.in_chunk(domain, iova).or_else(|| in_mapping(domain, iova));
        let (translation, permissions) = found.ok_or(FaultReason::Mapping)?;
        if permissions.contains(access) { Ok(translation) } else { Err(FaultReason::Mapping) }
    }

    fn in_chunk(&self, domain: &Domain, iova: u64) -> Option<(Translation, Permissions)> {
        let size = self.windows.as_ref()?.chunk_size();
        let (start, chunk) = domain.chunks.range(..=iova).next_back()?;
        let offset = iova - start;
        let len = size.checked_sub(offset).filter(|len| *len != 0)?;
        Some((Translation { target: Target::Chunk { index: chunk.index, offset }, len }, chunk.permissions))
    }

    /// Reports a fault of an endpoint to the driver. The endpoint is a device that the VMM emulates, or a device in another process.
    /// Returns `false` if the fault is dropped and counted, because the endpoint does not exist or too many faults occurred.
    pub fn report_fault(&mut self, fault: Fault) -> bool {
        let queued = self.endpoints.contains_key(&fault.endpoint) && self.faults.push(fault, Instant::now());
        if queued {
            self.counters.faults += 1;
        } else {
            self.counters.faults_dropped += 1;
        }
        queued
    }

    /// True if faults are pending for the driver.
    pub fn has_faults(&self) -> bool {
        !self.faults.is_empty()
    }

    /// Removes and returns the next fault to report.
    pub fn take_fault(&mut self) -> Option<Fault> {
        self.faults.pop()
    }

    /// Counts faults that could not be delivered to the driver.
    pub fn count_lost_faults(&mut self, count: u64) {
        self.counters.faults_dropped += count;
    }
}

fn in_mapping(domain: &Domain, iova: u64) -> Option<(Translation, Permissions)> {
    let (start, mapping) = domain.mappings.floor(iova)?;
    let left = mapping.last.checked_sub(iova)?;
    let target = Target::Ram(mapping.gpa + (iova - start));
    Some((Translation { target, len: left.saturating_add(1) }, mapping.permissions))
}

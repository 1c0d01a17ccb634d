// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Translation for devices that the VMM emulates, and the faults of all endpoints.

use std::time::Instant;

use super::Engine;
use crate::EndpointId;
use crate::backend::Permissions;
use crate::domain::Domain;
use crate::fault::{Fault, FaultReason};

/// What an IOVA leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Guest RAM at this guest-physical address.
    Ram(u64),
    /// A chunk of window memory.
    Chunk {
        /// The chunk's index in its store.
        index: u32,
        /// Bytes from the chunk's start.
        offset: u64,
    },
}

/// Where an access goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translation {
    /// What is at the IOVA.
    pub target: Target,
    /// How many bytes from there on are contiguous, 1 at least.
    pub len: u64,
}

impl Engine {
    /// Translates an access of a device that the VMM emulates; for other devices a [`DmaMapper`](crate::DmaMapper)
    /// does. The mapping must allow all of `access`.
    ///
    /// # Errors
    /// The fault. This call reports it to the driver. An access that is longer than [`Translation::len`] takes
    /// several calls.
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

    /// Reports a fault of an endpoint to the driver: of a device that the VMM emulates, or of one in another process.
    /// `false` if the fault is dropped and counted, because there is no such endpoint or too many faults came.
    pub fn report_fault(&mut self, fault: Fault) -> bool {
        let queued = self.endpoints.contains_key(&fault.endpoint) && self.faults.push(fault, Instant::now());
        if queued {
            self.counters.faults += 1;
        } else {
            self.counters.faults_dropped += 1;
        }
        queued
    }

    /// Whether faults wait for the driver.
    pub fn has_faults(&self) -> bool {
        !self.faults.is_empty()
    }

    /// Takes out the fault to report next.
    pub fn take_fault(&mut self) -> Option<Fault> {
        self.faults.pop()
    }

    /// Counts faults that could not be handed to the driver.
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

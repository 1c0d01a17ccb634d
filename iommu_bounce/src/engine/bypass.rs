// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Bypass: endpoints that reach all guest RAM, IOVA equal to GPA (virtio 1.3, section 5.13.6).
//!
//! An endpoint is in bypass mode when it is attached to a bypass domain, or to nothing while the configuration says
//! `bypass`. On the host both are like any other domain, with the regions of RAM as its mappings.

use std::time::{Duration, Instant};

use log::warn;

use super::Engine;
use crate::backend::{GuestRam, Permissions};
use crate::config::ConfigError;
use crate::counters::Counters;
use crate::domain::Domain;
use crate::mapping::{MappedMemory, Mapping};
use crate::space::Spaces;
use crate::spec::{Status, feature};
use crate::{EndpointId, SpaceId};

/// Mapping all RAM that takes so long is not done again at once.
pub(super) const LONG: Duration = Duration::from_millis(500);
/// For how many times as long it is not.
pub(super) const REST: u32 = 16;

/// A bypass domain: all RAM in whole granules.
pub(super) fn identity(ram: &dyn GuestRam, granule: u64) -> Domain {
    let mut domain = Domain { bypass: true, ..Domain::default() };
    for mapping in ram.regions().into_iter().filter_map(|(gpa, len)| itself(gpa, len, granule)) {
        domain.remember(mapping.gpa, mapping);
    }
    domain
}

/// A region of RAM in whole granules, at itself; `None` if it has none.
fn itself(gpa: u64, len: u64, granule: u64) -> Option<Mapping> {
    let mask = granule - 1;
    let end = gpa.checked_add(len)? & !mask;
    let start = gpa.checked_add(mask)? & !mask;
    (start < end).then(|| Mapping { last: end - 1, gpa: start, permissions: Permissions::READ | Permissions::WRITE })
}

/// Unmaps what a domain maps of the RAM at `[start, end)`, in these address spaces that hold the domain, and forgets it. A mapping of
/// which only a part is there goes as a whole: the host unmaps none in part. Returns how many there were.
fn forget_ram(
    domain: &mut Domain,
    (start, end): (u64, u64),
    ids: &[SpaceId],
    spaces: &mut Spaces,
    counters: &mut Counters,
) -> u64 {
    let touches = |iova: u64, mapping: &Mapping| mapping.gpa < end && mapping.gpa + (mapping.last - iova) >= start;
    let touched = domain.mappings.iter().filter(|(iova, mapping)| touches(*iova, mapping));
    let touched: Vec<(u64, u64)> = touched.map(|(iova, mapping)| (iova, mapping.last)).collect();
    let mut forgotten = 0;
    for (iova, last) in touched {
        for id in ids {
            spaces.get_mut(*id).discard(iova, last - iova + 1, MappedMemory::Ram, counters);
        }
        forgotten += domain.forget(iova, last);
    }
    forgotten
}

impl Engine {
    /// Serves the driver's write of the configuration's field `bypass`: endpoints that are attached to nothing reach
    /// all RAM, or nothing. It is ignored where RAM was just mapped so, and that took long, unless it ends that; and unless the feature was
    /// accepted and the value is 0 or 1. If the host cannot map RAM for all of them, or the VMM [interrupts](crate::Interrupt) it, the field
    /// stays as it was, and the driver can read it back.
    pub fn write_bypass(&mut self, value: u8) {
        if self.accepted & feature::BYPASS_CONFIG == 0 || value > 1 {
            return;
        }
        let began = Instant::now();
        if value == 1 && self.bypass_rests.is_some_and(|until| began < until) {
            warn!("bypass stays 0: the host is given time before it maps RAM again");
            return;
        }
        let before = std::mem::replace(&mut self.bypass, value == 1);
        self.pieces.set_allowed(true);
        let settled = if before == self.bypass { Ok(()) } else { self.settle_all() };
        self.pieces.set_allowed(false);
        self.pieces.take_happened();
        if value == 1 {
            let took = began.elapsed();
            self.bypass_rests = (took >= LONG).then(|| began + took * REST);
        }
        if let Err(status) = settled {
            warn!("bypass stays {}: the host does not map RAM for all endpoints ({status:?})", u8::from(before));
            self.bypass = before;
            let restored = self.settle_all();
            if let Err(status) = restored {
                warn!("an endpoint that is attached to nothing reaches nothing ({status:?})");
            }
        }
    }

    /// The guest gets the RAM at `[gpa, gpa + len)`, where there was none: endpoints in bypass mode reach it from now on.
    ///
    /// # Errors
    /// [`ConfigError::EndpointBypass`] if the host does not map it for one of them. Then no endpoint reaches it.
    pub fn add_ram(&mut self, gpa: u64, len: u64) -> Result<(), ConfigError> {
        let Some(mapping) = itself(gpa, len, self.config.granule()) else { return Ok(()) };
        let bypassed = |domain: &&Domain| domain.bypass;
        let mut spaces: Vec<SpaceId> =
            self.domains.values().filter(bypassed).flat_map(|domain| domain.spaces.iter().copied()).collect();
        let attached = spaces.len();
        spaces.extend(self.spaces.ids().into_iter().filter(|id| self.spaces.get(*id).identity));
        let counted = if self.config.bypass { attached } else { spaces.len() };
        let more = (mapping.last - mapping.gpa + 1).saturating_mul(counted as u64);
        if let (Err(_), [first, ..]) = (self.check_mapped(more), &spaces[..]) {
            return Err(ConfigError::EndpointBypass(self.spaces.get(*first).name()));
        }
        for (done, id) in spaces.iter().enumerate() {
            if let Err(endpoint) = self.map_for_bypass(*id, &mapping) {
                for id in &spaces[..done] {
                    let space = self.spaces.get_mut(*id);
                    space.discard(mapping.gpa, mapping.last - mapping.gpa + 1, MappedMemory::Ram, &mut self.counters);
                }
                return Err(ConfigError::EndpointBypass(endpoint));
            }
        }
        self.identity.remember(mapping.gpa, mapping);
        for domain in self.domains.values_mut().filter(|domain| domain.bypass) {
            domain.remember(mapping.gpa, mapping);
        }
        Ok(())
    }

    /// The guest does not get the RAM at `[gpa, gpa + len)` after all, which is a whole region. It was to be seen for a while, so a driver
    /// that guessed its address may have mapped it: whatever touches it is unmapped for all endpoints and forgotten, and those in
    /// bypass mode do not reach it either. [`GuestRam`] must no longer give it out.
    ///
    /// `false` if the host keeps something mapped: then an endpoint may still reach the RAM, so nobody else may get its pages. Another
    /// call tries again.
    #[must_use]
    pub fn take_ram(&mut self, gpa: u64, len: u64) -> bool {
        self.retry_stuck();
        let region = (gpa, gpa.saturating_add(len));
        for domain in self.domains.values_mut() {
            let ids = domain.spaces.clone();
            let forgotten = forget_ram(domain, region, &ids, &mut self.spaces, &mut self.counters);
            // Those of a bypass domain are not the driver's, and were not counted.
            self.counters.mappings -= if domain.bypass { 0 } else { forgotten };
        }
        let mut unattached = self.spaces.ids();
        unattached.retain(|id| self.spaces.get(*id).identity);
        forget_ram(&mut self.identity, region, &unattached, &mut self.spaces, &mut self.counters);
        self.counters.stuck_ranges == 0
    }

    /// Maps more RAM in an address space that has all of it. The error is the endpoint that it was made for.
    fn map_for_bypass(&mut self, id: SpaceId, mapping: &Mapping) -> Result<(), EndpointId> {
        let space = self.spaces.get(id);
        let reach = |id| self.endpoints.get(id).is_some_and(|endpoint| endpoint.can_map(mapping.gpa, mapping.last));
        if let Some(short) = space.endpoints.iter().find(|id| !reach(id)) {
            return Err(*short);
        }
        let space = self.spaces.get_mut(id);
        let name = space.name();
        space.map_ram(mapping.gpa, mapping, &*self.ram, &mut self.counters).map_err(|_| name)
    }

    /// Maps all RAM, or nothing, in every address space whose endpoints are attached to nothing. Goes on after a
    /// failure, and returns the first one.
    pub(super) fn settle_all(&mut self) -> Result<(), Status> {
        let mut outcome = Ok(());
        for id in self.spaces.ids() {
            outcome = outcome.and(self.settle(id));
        }
        outcome
    }

    /// As [`settle_all`](Self::settle_all), for one address space.
    pub(super) fn settle(&mut self, id: SpaceId) -> Result<(), Status> {
        let space = self.spaces.get_mut(id);
        let endpoints = space.endpoints.iter().filter_map(|id| self.endpoints.get(id));
        let unattached = !space.endpoints.is_empty() && endpoints.clone().all(|endpoint| endpoint.domain.is_none());
        let wanted = self.bypass && unattached;
        if wanted == space.identity {
            return Ok(());
        }
        if !wanted {
            space.withdraw(&self.identity, self.windows.as_ref(), &mut self.counters);
            space.identity = false;
            return Ok(());
        }
        let mut ranges = self.identity.mappings.iter();
        let can_map =
            |(start, mapping): (u64, Mapping)| endpoints.clone().all(|endpoint| endpoint.can_map(start, mapping.last));
        if !ranges.all(can_map) {
            return Err(Status::Unsupp);
        }
        if space.is_stuck() {
            return Err(Status::DevErr);
        }
        self.check_mapped(self.counted_identity())?;
        let space = self.spaces.get_mut(id);
        space.install(&self.identity, &*self.ram, self.windows.as_ref(), &mut self.counters)?;
        space.identity = true;
        Ok(())
    }
}

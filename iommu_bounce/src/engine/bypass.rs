// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Bypass: endpoints that can access all guest RAM, with IOVA equal to GPA (virtio 1.3, section 5.13.6).
//!
//! An endpoint is in bypass mode if it is attached to a bypass domain, or if it is unattached while the configuration field `bypass` is 1.
//! In both cases, the engine maps the regions of RAM in the host address space, like the mappings of any other domain.

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

/// If mapping all RAM took at least this long, a cooldown follows. During the cooldown, the engine does not map all RAM again for
/// unattached endpoints.
pub(super) const LONG: Duration = Duration::from_millis(500);
/// Duration of the cooldown, as a multiple of the time that mapping all RAM took.
pub(super) const REST: u32 = 16;

/// Returns a bypass domain, which maps all whole granules of RAM.
pub(super) fn identity(ram: &dyn GuestRam, granule: u64) -> Domain {
    let mut domain = Domain { bypass: true, ..Domain::default() };
    for mapping in ram.regions().into_iter().filter_map(|(gpa, len)| itself(gpa, len, granule)) {
        domain.remember(mapping.gpa, mapping);
    }
    domain
}

/// Returns the identity mapping of a RAM region in whole granules, or `None` if the region has no whole granule.
fn itself(gpa: u64, len: u64, granule: u64) -> Option<Mapping> {
    let mask = granule - 1;
    let end = gpa.checked_add(len)? & !mask;
    let start = gpa.checked_add(mask)? & !mask;
    (start < end).then(|| Mapping { last: end - 1, gpa: start, permissions: Permissions::READ | Permissions::WRITE })
}

/// Removes the domain's mappings of the RAM at `[start, end)`, and unmaps them in the address spaces `ids`, which hold the domain. A
/// mapping that overlaps the range only partly is removed completely, because the host cannot split it. Returns the number of
/// removed mappings.
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
    /// Serves the driver's write to the configuration field `bypass`. With 1, unattached endpoints can access all RAM. With 0, they can
    /// access nothing. The write is ignored if the feature was not accepted, or if the value is not 0 or 1. A write of 1 is also ignored
    /// during the cooldown after a slow mapping of all RAM. The field keeps its old value if the host cannot map RAM for all endpoints, or
    /// the VMM [interrupts](crate::Interrupt) the write. The driver can read the field back.
    pub fn write_bypass(&mut self, value: u8) {
        if self.accepted & feature::BYPASS_CONFIG == 0 || value > 1 {
            return;
        }
        let began = Instant::now();
        if value == 1 && self.bypass_rests.is_some_and(|until| began < until) {
            warn!(
                "virtio-iommu: ignored the driver's write of 1 to bypass: the last mapping of all RAM was slow, so the driver must wait before it tries again"
            );
            return;
        }
        let before = std::mem::replace(&mut self.bypass, value == 1);
        self.steps.set_allowed(true);
        let settled = if before == self.bypass { Ok(()) } else { self.settle_all() };
        self.steps.set_allowed(false);
        self.steps.take_happened();
        if value == 1 {
            let took = began.elapsed();
            self.bypass_rests = (took >= LONG).then(|| began + took * REST);
        }
        if let Err(status) = settled {
            warn!(
                "virtio-iommu: bypass stays {}, because RAM cannot be mapped for all endpoints (status {status:?}); check the limits on locked memory (ulimit -l) and on mapped RAM",
                u8::from(before)
            );
            self.bypass = before;
            let restored = self.settle_all();
            if let Err(status) = restored {
                warn!("virtio-iommu: an unattached endpoint lost its access to RAM (status {status:?})");
            }
        }
    }

    /// Adds RAM at `[gpa, gpa + len)`, where the guest had no RAM. Endpoints in bypass mode can access the RAM from now on.
    ///
    /// # Errors
    /// [`ConfigError::EndpointBypass`] if the host cannot map the RAM for one of these endpoints. After the error, no endpoint can access
    /// the added RAM.
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

    /// Undoes the addition of the RAM region `[gpa, gpa + len)`, which is removed from the guest. The RAM was visible for a while, so a
    /// driver that guessed its address may have mapped it. All mappings that touch the region are unmapped and removed for all endpoints,
    /// including endpoints in bypass mode. [`GuestRam`] must no longer return the region.
    ///
    /// Returns `false` if the host fails to unmap a range. In this case, an endpoint may still access the RAM, so the RAM's pages must not
    /// be reused. Call this function again to retry the unmap.
    #[must_use]
    pub fn take_ram(&mut self, gpa: u64, len: u64) -> bool {
        self.retry_stuck();
        let region = (gpa, gpa.saturating_add(len));
        for domain in self.domains.values_mut() {
            let ids = domain.spaces.clone();
            let forgotten = forget_ram(domain, region, &ids, &mut self.spaces, &mut self.counters);
            // Mappings of a bypass domain are not counted, because the driver did not make them.
            self.counters.mappings -= if domain.bypass { 0 } else { forgotten };
        }
        let mut unattached = self.spaces.ids();
        unattached.retain(|id| self.spaces.get(*id).identity);
        forget_ram(&mut self.identity, region, &unattached, &mut self.spaces, &mut self.counters);
        self.counters.stuck_ranges == 0
    }

    /// Maps added RAM in an address space that holds all other RAM. The error is the ID of an endpoint that cannot map the range. If the
    /// host fails, the error is the ID of the endpoint that the address space was created for.
    fn map_for_bypass(&mut self, id: SpaceId, mapping: &Mapping) -> Result<(), EndpointId> {
        let space = self.spaces.get(id);
        let covers = |id| self.endpoints.get(id).is_some_and(|endpoint| endpoint.can_map(mapping.gpa, mapping.last));
        if let Some(short) = space.endpoints.iter().find(|id| !covers(id)) {
            return Err(*short);
        }
        let space = self.spaces.get_mut(id);
        let name = space.name();
        space.map_ram(mapping.gpa, mapping, &*self.ram, &mut self.counters).map_err(|_| name)
    }

    /// Makes every address space match `bypass`. If bypass is on and all endpoints of an address space are unattached, maps all RAM in the
    /// address space. Otherwise, unmaps RAM that bypass mapped. Continues after a failure, and returns the first error.
    pub(super) fn settle_all(&mut self) -> Result<(), Status> {
        let mut outcome = Ok(());
        for id in self.spaces.ids() {
            outcome = outcome.and(self.settle(id));
        }
        outcome
    }

    /// Makes one address space match `bypass`, like [`settle_all`](Self::settle_all).
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

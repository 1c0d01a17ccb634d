// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Postponed mapping of RAM for bypass. While `bypass` is 1, an endpoint that a DETACH or a device reset leaves unattached can access all
//! RAM. The host can take long to map all RAM. Meanwhile, all other threads that need the engine wait.
//!
//! A driver could cause such waits repeatedly. So the engine postpones the mapping if the batch has used up its time, or if a thread waits.
//! A slow mapping of RAM starts a cooldown. During the cooldown, the engine also postpones mappings of RAM, except mappings that a device
//! reset requires. While the mapping is postponed, the endpoint has no access, as on a host that refuses to map RAM. If the host kernel
//! does not pin the memory of an address space, the mapping is never postponed, because mapping then takes almost no time.

use std::time::{Duration, Instant};

use super::bypass::{LONG, REST};
use super::{Engine, MOST_OF_BATCH};
use crate::SpaceId;
use crate::spec::Status;

impl Engine {
    /// Does the same as [`settle`](Self::settle) for several address spaces, as a consequence of a driver's request. The mapping of RAM is
    /// postponed if the batch has used up its time, or if a thread waits. If `rests` is true, the mapping is also postponed during the
    /// cooldown. A postponed mapping is not an error.
    pub(super) fn settle_in_time(&mut self, ids: &[SpaceId], rests: bool) -> Result<(), Status> {
        let began = Instant::now();
        let rests = rests && self.bypass_rests(began);
        let (mut outcome, mut mapped) = (Ok(()), false);
        let allowed = self.steps.set_allowed(true);
        for &id in ids {
            if self.wants_ram(id) && self.spaces.get(id).pins() {
                // If a thread waits, map the RAM of at most one address space. If this mapping takes several steps, `settle` stops between
                // two steps, as an interrupted request does.
                if rests || self.is_batch_spent(began.elapsed()) || (mapped && self.steps.end_here()) {
                    // `end_here` records an interruption. Clear the record, because nothing was interrupted.
                    self.steps.take_happened();
                    self.bypass_put_off = true;
                    continue;
                }
                mapped = true;
            }
            let settled = self.settle(id);
            if self.steps.take_happened() {
                self.bypass_put_off = true;
            } else {
                outcome = outcome.and(settled);
            }
        }
        self.steps.set_allowed(allowed);
        if mapped {
            let took = began.elapsed();
            self.bypass_rests = (took >= LONG).then(|| began + took * REST);
        }
        outcome
    }

    /// Maps postponed RAM for endpoints in bypass mode. Does nothing during the cooldown, or if the batch has used up its time. The VMM
    /// must call this function when the device continues after a pause: a reset before the pause may have postponed the mapping. Without a
    /// driver, no request would map the RAM.
    pub fn catch_up(&mut self) {
        if !self.bypass_put_off {
            return;
        }
        let began = Instant::now();
        if self.bypass_rests(began) || self.is_batch_spent(Duration::ZERO) {
            return;
        }
        // If the host refuses to map the RAM now, the engine does not retry.
        self.bypass_put_off = false;
        if let Err(status) = self.settle_in_time(&self.spaces.ids(), true) {
            log::debug!("virtio-iommu: endpoints in bypass mode have no access to RAM yet (status {status:?})");
        }
        self.batch = self.batch.map(|spent| spent + began.elapsed());
    }

    /// True if the current batch, including `more`, has used up its time.
    pub(super) fn is_batch_spent(&self, more: Duration) -> bool {
        self.batch.is_some_and(|spent| spent + more >= MOST_OF_BATCH)
    }

    /// True during the cooldown after a slow mapping of all RAM.
    fn bypass_rests(&self, now: Instant) -> bool {
        self.bypass_rests.is_some_and(|until| now < until)
    }

    /// True if the address space should hold all RAM but does not.
    fn wants_ram(&self, id: SpaceId) -> bool {
        let space = self.spaces.get(id);
        let unattached = |id| self.endpoints.get(id).is_none_or(|endpoint| endpoint.domain.is_none());
        self.bypass && !space.identity && !space.endpoints.is_empty() && space.endpoints.iter().all(unattached)
    }
}

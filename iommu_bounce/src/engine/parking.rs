// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Parking: chunks whose host mapping survives a reset of the VM (docs/bounce-windows.md, rule 7).
//!
//! A parked chunk belongs to no domain. The chunk is zeroed, and the guest does not see the chunk. But the address space of its previous
//! endpoint still maps the chunk. A WINDOW_ADD with the same IOVA and permissions for that endpoint reuses the chunk without a host call. A
//! parked chunk counts towards the budget. Before a request is rejected for lack of memory, parked chunks are released.

use std::collections::BTreeMap;

use super::Engine;
use crate::backend::Permissions;
use crate::mapping::{Chunk, MappedMemory};
use crate::windows::Windows;
use crate::{DomainId, SpaceId};

impl Engine {
    /// Resets the device as part of a reset of the VM. Call this function while no vCPU runs and no endpoint can access memory. Chunks are
    /// parked, and everything else is as after [`reset`](Self::reset). The configuration field `bypass` gets its initial value again.
    pub fn system_reset(&mut self) {
        self.retry_stuck();
        for id in self.spaces.ids() {
            // The endpoint may have written to parked chunks since the last reset. So park them again, which zeroes them.
            let parked = std::mem::take(&mut self.spaces.get_mut(id).parked);
            self.counters.parked_chunks -= parked.len() as u64;
            self.park(id, &parked);
        }
        self.end_domains(true);
        // If the budget was lowered, domains may have had more chunks than the budget allows.
        self.evict_over_budget();
        self.counters.faults_dropped += self.faults.clear();
        self.accepted = 0;
        self.bypass = self.config.bypass;
        (self.bypass_rests, self.bypass_put_off) = (None, false);
        if let Err(status) = self.settle_all() {
            log::warn!(
                "virtio-iommu: cannot map RAM for all endpoints in bypass mode (status {status:?}); check the limits on locked memory (ulimit -l) and on mapped RAM"
            );
        }
    }

    /// Parks chunks that the address space maps. Chunks that cannot be parked are unmapped and released.
    pub(super) fn park(&mut self, id: SpaceId, chunks: &BTreeMap<u64, Chunk>) {
        for (&iova, chunk) in chunks {
            let parked = self.windows.as_mut().is_some_and(|windows| windows.park(chunk.index, &mut self.counters));
            self.spaces.get_mut(id).parked.insert(iova, *chunk);
            self.counters.parked_chunks += 1;
            if !parked {
                self.evict(id, iova);
            }
        }
    }

    /// Returns the chunk that is parked at `iova`, if the domain can reuse the chunk. The domain must have only one address space, and the
    /// permissions must be the same. Otherwise, releases the chunks that are parked at `iova` in the domain's address spaces, and returns
    /// `None`.
    pub(super) fn unpark(&mut self, domain: DomainId, iova: u64, permissions: Permissions) -> Option<Chunk> {
        if self.counters.parked_chunks == 0 {
            return None;
        }
        let spaces = self.domains.get(&domain)?.spaces.clone();
        if let [id] = spaces[..] {
            let fits = |chunk: &&Chunk| chunk.permissions == permissions;
            let chunk = self.spaces.get(id).parked.get(&iova).filter(fits).copied();
            if let (Some(chunk), Some(windows)) = (chunk, &mut self.windows)
                && windows.unpark(chunk.index, &mut self.counters)
            {
                self.spaces.get_mut(id).parked.remove(&iova);
                self.counters.parked_chunks -= 1;
                self.counters.unparked_chunks += 1;
                return Some(chunk);
            }
        }
        spaces.iter().for_each(|id| self.evict(*id, iova));
        None
    }

    /// Unmaps and releases the chunk that is parked at `iova`. Does nothing if no chunk is parked at `iova`.
    fn evict(&mut self, id: SpaceId, iova: u64) {
        let (space, Some(windows)) = (self.spaces.get_mut(id), &self.windows) else {
            return;
        };
        if let Some(chunk) = space.parked.remove(&iova) {
            self.counters.parked_chunks -= 1;
            space.discard(iova, windows.chunk_size(), MappedMemory::Chunk(chunk.index), &mut self.counters);
            self.give_back(chunk.index);
        }
    }

    /// Unmaps and releases one parked chunk. Returns `false` if no chunk is parked.
    pub(super) fn evict_one(&mut self) -> bool {
        let first = |id: SpaceId| Some((id, *self.spaces.get(id).parked.first_key_value()?.0));
        let found = self.spaces.ids().into_iter().find_map(first);
        found.is_some_and(|(id, iova)| {
            self.evict(id, iova);
            true
        })
    }

    /// Releases one parked chunk, so that a request that failed for lack of memory can be retried. Returns `false` if no chunk is
    /// parked. Also returns `false` if a range of the domain is stuck before or after the release, because the request may map an
    /// overlapping range.
    pub(super) fn make_room(&mut self, domain: DomainId) -> bool {
        !self.is_domain_stuck(domain) && self.evict_one() && !self.is_domain_stuck(domain)
    }

    fn is_domain_stuck(&self, id: DomainId) -> bool {
        self.domains.get(&id).is_some_and(|domain| self.is_stuck(domain))
    }

    /// Unmaps and releases parked chunks until the backed memory is within the budget, or no chunk is parked.
    pub(super) fn evict_over_budget(&mut self) {
        while self.windows.as_ref().is_some_and(Windows::is_over_budget) && self.evict_one() {}
    }

    /// Unmaps and releases all chunks that are parked in an address space.
    pub(super) fn evict_from(&mut self, id: SpaceId) {
        while let Some((&iova, _)) = self.spaces.get(id).parked.first_key_value() {
            self.evict(id, iova);
        }
    }

    /// Unmaps and releases all parked chunks.
    pub(super) fn evict_all(&mut self) {
        while self.counters.parked_chunks != 0 && self.evict_one() {}
    }
}

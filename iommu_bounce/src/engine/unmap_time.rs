// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How long it would take to unmap all that is mapped. A DETACH, an UNMAP of all addresses, and a reset unmap it in one go, for which
//! the guest, and whoever pauses or ends the VM, waits: a request that was begun cannot be left half done.
//!
//! So mappings are limited by their number, and by what that number costs on this host: the calls to mappers are timed. Where a call
//! takes 3 µs the number is what limits; where it takes 100 µs, as in a VM whose own IOMMU is emulated, the time does.

use super::Engine;
use crate::SpaceId;
use crate::space::ALWAYS;
use crate::spec::Status;

impl Engine {
    /// Whether `more` mappings of the host, one in each of some address spaces, still leave what is mapped to be unmapped in
    /// [`max_unmap_time`]; `NOMEM` if not.
    ///
    /// [`max_unmap_time`]: crate::Limits::max_unmap_time
    pub(super) fn check_unmap_time(&self, more: u64) -> Result<(), Status> {
        // The time of one more is nothing beside that of all.
        self.check_unmap_time_with(None, more)
    }

    /// As [`check_unmap_time`](Self::check_unmap_time), for all that a domain maps, in an address space that gets it.
    pub(super) fn check_unmap_time_in(&self, space: SpaceId, more: u64) -> Result<(), Status> {
        self.check_unmap_time_with(Some(space), more)
    }

    fn check_unmap_time_with(&self, space: Option<SpaceId>, more: u64) -> Result<(), Status> {
        // As if each domain were in all address spaces, which is soon known.
        let spaces = self.endpoints.len() as u64;
        if self.counters.mappings.saturating_mul(spaces).saturating_add(more) <= ALWAYS {
            return Ok(());
        }
        // Each address space has times of its own: calls for an emulated device are fast, and say nothing of those for one of the host.
        // One of which nothing is known holds little. When it gets a whole domain, its calls are timed meanwhile.
        let call = |id: SpaceId| self.spaces.get(id).call_ns();
        let (mut mappings, mut time) = (more, space.map_or(0, |id| more.saturating_mul(call(id))));
        for domain in self.domains.values() {
            let count = domain.count();
            for id in &domain.spaces {
                mappings = mappings.saturating_add(count);
                time = time.saturating_add(count.saturating_mul(call(*id)));
            }
        }
        let most = u64::try_from(self.config.limits.max_unmap_time.as_nanos()).unwrap_or(u64::MAX);
        if mappings <= ALWAYS || time <= most { Ok(()) } else { Err(Status::NoMem) }
    }
}

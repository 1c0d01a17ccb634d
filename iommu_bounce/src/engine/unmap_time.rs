// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How long it would take to unmap all that is mapped. A DETACH, an UNMAP of all addresses, and a reset unmap it in one go, for which
//! the guest, and whoever pauses or ends the VM, waits: a request that was begun cannot be left half done.
//!
//! So mappings are limited by their number, and by what that number costs on this host: the calls to mappers are timed. Where a call
//! takes 3 µs the number is what limits; where it takes 100 µs, as in a VM whose own IOMMU is emulated, the time does.

use super::Engine;
use crate::SpaceId;
use crate::domain::Domain;
use crate::space::{ALWAYS, Space};
use crate::spec::Status;

impl Engine {
    /// Whether one mapping more of a domain still leaves what is mapped to be unmapped in [`max_unmap_time`]; `NOMEM` if not. Where its
    /// mappers are fast it is given whatever others take: it takes next to nothing of the time.
    ///
    /// [`max_unmap_time`]: crate::Limits::max_unmap_time
    pub(super) fn check_unmap_time(&self, domain: &Domain) -> Result<(), Status> {
        let more = domain.spaces.len() as u64;
        if self.are_few(more) || domain.spaces.iter().all(|id| self.is_fast(self.spaces.get(*id))) {
            return Ok(());
        }
        // The time of one more is nothing beside that of all.
        self.check_sum(more, 0)
    }

    /// The same for all that a domain maps, `more` mappings, for an endpoint in this address space.
    pub(super) fn check_unmap_time_of(&self, place: SpaceId, more: u64) -> Result<(), Status> {
        if self.are_few(more) {
            return Ok(());
        }
        let space = self.spaces.get(place);
        let call = if space.endpoints.len() > 1 {
            // It moves into another address space, in which no device is: calls take no time there, and then all at once.
            let group = self.spaces.iter().filter(|other| other.group() == space.group());
            let call = group.map(Space::call_ns).max().filter(|call| *call != 0);
            if more > ALWAYS { call.ok_or(Status::NoMem)? } else { call.unwrap_or(0) }
        } else {
            // Where it is not known, it is looked at while the domain is mapped.
            space.call_ns()
        };
        self.check_sum(more, more.saturating_mul(call))
    }

    /// Whether there are so few mappings that their time is not looked at. As if each domain were in all address spaces, which is soon known.
    fn are_few(&self, more: u64) -> bool {
        self.counters.mappings.saturating_mul(self.endpoints.len() as u64).saturating_add(more) <= ALWAYS
    }

    /// Whether even the most mappings that there may be are unmapped in time.
    fn is_fast(&self, space: &Space) -> bool {
        let call = space.call_ns();
        call != 0 && call.saturating_mul(self.config.limits.max_mappings as u64) <= self.most_ns()
    }

    fn most_ns(&self) -> u64 {
        u64::try_from(self.config.limits.max_unmap_time.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Whether these mappings, which take `time` ns to unmap, and all that there are can be unmapped in time.
    fn check_sum(&self, mut mappings: u64, mut time: u64) -> Result<(), Status> {
        // Each address space has times of its own: calls for an emulated device are fast, and say nothing of those for one of the host.
        for domain in self.domains.values() {
            let count = domain.count();
            for id in &domain.spaces {
                mappings = mappings.saturating_add(count);
                time = time.saturating_add(count.saturating_mul(self.spaces.get(*id).call_ns()));
            }
        }
        if mappings <= ALWAYS || time <= self.most_ns() { Ok(()) } else { Err(Status::NoMem) }
    }
}

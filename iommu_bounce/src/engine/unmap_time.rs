// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Estimate of the time to unmap everything. A DETACH, an UNMAP of all addresses, and a reset each unmap everything in one request. The
//! guest waits for the request. A thread that pauses or stops the VM waits too, because the engine cannot interrupt an unmap.
//!
//! So the engine limits the number of mappings, and the time that unmapping all of them takes on this host. To estimate the time,
//! the engine measures mapper calls. If a call takes 3 µs, the limit on the number is reached first. If a call takes 100 µs, as in a
//! VM with an emulated IOMMU, the limit on the time is reached first.

use super::Engine;
use crate::SpaceId;
use crate::domain::Domain;
use crate::space::{ALWAYS, Space};
use crate::spec::Status;

impl Engine {
    /// Checks that everything could still be unmapped within [`max_unmap_time`] after one more mapping of a domain. Returns
    /// `NOMEM` if not. If the mappers of the domain are fast, the mapping is always allowed, because it adds almost no time.
    ///
    /// [`max_unmap_time`]: crate::Limits::max_unmap_time
    pub(super) fn check_unmap_time(&self, domain: &Domain) -> Result<(), Status> {
        let more = domain.spaces.len() as u64;
        if self.are_few(more) || domain.spaces.iter().all(|id| self.is_fast(self.spaces.get(*id))) {
            return Ok(());
        }
        // The time for one more mapping is negligible compared to the total, so pass 0.
        self.check_sum(more, 0)
    }

    /// Does the same check before an endpoint in this address space attaches to a domain with `more` mappings.
    pub(super) fn check_unmap_time_of(&self, place: SpaceId, more: u64) -> Result<(), Status> {
        if self.are_few(more) {
            return Ok(());
        }
        let space = self.spaces.get(place);
        let call = if space.endpoints.len() > 1 {
            // The endpoint moves into an address space without devices. Map calls in such an address space take no time, because the host
            // does the work when a device is attached. So use the slowest typical call of the group.
            let group = self.spaces.iter().filter(|other| other.group() == space.group());
            let call = group.map(Space::call_ns).max().filter(|call| *call != 0);
            if more > ALWAYS { call.ok_or(Status::NoMem)? } else { call.unwrap_or(0) }
        } else {
            // 0 means that the duration of a call is unknown. In this case, `Space::install` checks the duration while it maps the domain.
            space.call_ns()
        };
        self.check_sum(more, more.saturating_mul(call))
    }

    /// True if there are so few mappings that their time is not checked. This function counts each domain as if it were in all address
    /// spaces, which gives an upper bound quickly.
    fn are_few(&self, more: u64) -> bool {
        self.counters.mappings.saturating_mul(self.endpoints.len() as u64).saturating_add(more) <= ALWAYS
    }

    /// True if even the maximum number of mappings can be unmapped in time.
    fn is_fast(&self, space: &Space) -> bool {
        let call = space.call_ns();
        call != 0 && call.saturating_mul(self.config.limits.max_mappings as u64) <= self.most_ns()
    }

    fn most_ns(&self) -> u64 {
        u64::try_from(self.config.limits.max_unmap_time.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Checks that all existing mappings and `mappings` more can be unmapped in time. Unmapping the additional mappings takes `time` ns.
    fn check_sum(&self, mut mappings: u64, mut time: u64) -> Result<(), Status> {
        // Use the typical duration of a call of each address space. Calls for an emulated device are fast, and do not predict calls for a
        // host device.
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

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! How long it would take to unmap all that is mapped. A DETACH, an UNMAP of all addresses, and a reset unmap it in one go, for which
//! the guest, and whoever pauses or ends the VM, waits: a request that was begun cannot be left half done.
//!
//! So mappings are limited by their number, and by what that number costs on this host: the calls to mappers are timed. Where a call
//! takes 3 µs the number is what limits; where it takes 100 µs, as in a VM whose own IOMMU is emulated, the time does.

use super::Engine;
use crate::spec::Status;

/// So many mappings are never too many: few calls were timed before.
const ALWAYS: u64 = 4096;

impl Engine {
    /// Whether `more` mappings of the host still leave what is mapped to be unmapped in [`max_unmap_time`]; `NOMEM` if not.
    ///
    /// [`max_unmap_time`]: crate::Limits::max_unmap_time
    pub(super) fn check_unmap_time(&self, more: u64) -> Result<(), Status> {
        // As if each domain were in all address spaces, which is soon known.
        let spaces = self.endpoints.len() as u64;
        if self.counters.mappings.saturating_mul(spaces).saturating_add(more) <= ALWAYS {
            return Ok(());
        }
        let host = &self.counters.host;
        // Typical ones: a call that had to wait for the CPU says nothing of others.
        let call = host.map.quantile_ns(500).max(host.unmap.quantile_ns(500)).max(1);
        let most = u64::try_from(self.config.limits.max_unmap_time.as_nanos()).unwrap_or(u64::MAX) / call;
        let fits = self.host_mappings().saturating_add(more) <= most.max(ALWAYS);
        if fits { Ok(()) } else { Err(Status::NoMem) }
    }

    /// Mappings of the host that the guest's requests made, over all address spaces.
    fn host_mappings(&self) -> u64 {
        self.domains.values().map(|domain| domain.count() * domain.spaces.len() as u64).sum()
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Cap on mapped bytes: the maximum guest RAM that the host keeps mapped, and therefore pinned, on behalf of the guest.
//!
//! Mapped bytes are counted as VFIO counts pinned memory. Each mapping in each host address space counts, even if another mapping covers
//! the same page. So a page counts twice if two mappings cover it, or if two address spaces map it. For each mapping, the kernel takes a
//! reference to the page, and counts the page as locked memory. See `vfio_pin_pages_remote()` of `drivers/vfio/vfio_iommu_type1.c`, and
//! `iopt_pages_update_pinned()` of `drivers/iommu/iommufd/pages.c`. Chunks do not count, because the budget limits them.
//!
//! If the VMM turns bypass on at power-on, RAM that unattached endpoints access through bypass does not count either. Firmware needs this
//! bypass to read the boot disk. If the guest turns bypass off and on again, this RAM still does not count, because the guest could also
//! regain bypass by a reset of the VM.

use super::Engine;
use crate::config::ConfigError;
use crate::domain::Domain;
use crate::spec::Status;
use crate::{DomainId, SpaceId};

impl Engine {
    /// Returns the maximum bytes of mapped guest RAM, or `None` if only the host limits them.
    pub fn max_mapped_bytes(&self) -> Option<u64> {
        Some(self.config.limits.max_mapped_bytes).filter(|bytes| *bytes != u64::MAX)
    }

    /// Changes the maximum bytes of mapped guest RAM. Existing mappings stay. If more bytes are mapped than the limit allows, requests that
    /// map RAM get `NOMEM`. If endpoints in bypass mode have no access to RAM, a raised limit gives them access, as far as the new limit
    /// allows.
    ///
    /// # Errors
    /// [`ConfigError::ZeroLimit`] if `bytes` is 0.
    pub fn set_max_mapped_bytes(&mut self, bytes: Option<u64>) -> Result<(), ConfigError> {
        if bytes == Some(0) {
            return Err(ConfigError::ZeroLimit("max_mapped_bytes"));
        }
        let bytes = bytes.unwrap_or(u64::MAX);
        let before = std::mem::replace(&mut self.config.limits.max_mapped_bytes, bytes);
        if bytes > before
            && self.bypass
            && let Err(status) = self.settle_all()
        {
            log::warn!(
                "virtio-iommu: some endpoints in bypass mode have no access to RAM yet (status {status:?}); check the limits on locked memory (ulimit -l) and on mapped RAM"
            );
        }
        Ok(())
    }

    /// Checks that `more` bytes can be mapped, over all address spaces. Returns `NOMEM` if not.
    pub(super) fn check_mapped(&self, more: u64) -> Result<(), Status> {
        let max = self.config.limits.max_mapped_bytes;
        let fits = more == 0 || max == u64::MAX || self.counted_bytes().saturating_add(more) <= max;
        if fits { Ok(()) } else { Err(Status::NoMem) }
    }

    /// Returns the bytes of RAM that count towards the cap for an address space of unattached endpoints in bypass mode.
    pub(super) fn counted_identity(&self) -> u64 {
        if self.config.bypass { 0 } else { self.identity.mapped_bytes }
    }

    /// Returns the mapped bytes that count towards the cap.
    fn counted_bytes(&self) -> u64 {
        let free = self.identity.mapped_bytes - self.counted_identity();
        let spaces = if free == 0 { 0 } else { self.spaces.iter().filter(|space| space.identity).count() as u64 };
        self.counters.mapped_bytes.saturating_sub(free.saturating_mul(spaces))
    }

    /// Returns the additional bytes that are mapped if an endpoint moves from the domain `old` to the domain `new`. `content` is the domain
    /// `new`, if it exists.
    pub(super) fn more_mapped(
        &self,
        from: SpaceId,
        old: Option<DomainId>,
        new: DomainId,
        content: Option<&Domain>,
    ) -> u64 {
        let needed = content.map_or(0, |domain| domain.mapped_bytes);
        if needed == 0 || self.joinable(from, new).is_some() {
            return 0;
        }
        let space = self.spaces.get(from);
        if space.endpoints.len() > 1 {
            return needed;
        }
        let replaced = match old {
            Some(old) => self.domains.get(&old).map_or(0, |domain| domain.mapped_bytes),
            None if space.identity => self.counted_identity(),
            None => 0,
        };
        needed.saturating_sub(replaced)
    }
}

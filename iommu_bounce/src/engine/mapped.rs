// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The cap on mapped bytes: how much guest RAM the host keeps mapped, and so pinned, because the guest asked for it.
//!
//! It counts as VFIO accounts: each mapping in each address space of the host, whether or not another one leads to the same page.
//! So a page that is mapped twice counts twice, and so does one that two address spaces map. The kernel keeps a reference for each
//! of these and adds each to the locked memory (`vfio_pin_pages_remote()` of `drivers/vfio/vfio_iommu_type1.c`,
//! `iopt_pages_update_pinned()` of `drivers/iommu/iommufd/pages.c`). Chunks do not count: they have the budget.
//!
//! Bypass that the VMM has on from power-on does not count either: firmware reads its disk by it, and no guest asked for it. A guest
//! could have it by a reset of the VM at any time, so it does not matter when the guest turned it on.

use super::Engine;
use crate::config::ConfigError;
use crate::domain::Domain;
use crate::spec::Status;
use crate::{DomainId, SpaceId};

impl Engine {
    /// The most bytes of guest RAM that may be mapped; `None` if nothing but the host limits them.
    pub fn max_mapped_bytes(&self) -> Option<u64> {
        Some(self.config.limits.max_mapped_bytes).filter(|bytes| *bytes != u64::MAX)
    }

    /// Changes the most bytes of guest RAM that may be mapped. What is mapped stays; where it is more, requests that map get `NOMEM`
    /// until it is less. With a larger limit, endpoints in bypass mode that reached nothing for want of it reach RAM as far as it allows.
    ///
    /// # Errors
    /// [`ConfigError::ZeroLimit`].
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
            log::warn!("not all endpoints in bypass mode reach RAM yet ({status:?})");
        }
        Ok(())
    }

    /// Whether `more` bytes may be mapped, in all address spaces together; `NOMEM` if not.
    pub(super) fn check_mapped(&self, more: u64) -> Result<(), Status> {
        let max = self.config.limits.max_mapped_bytes;
        let fits = more == 0 || max == u64::MAX || self.counted_bytes().saturating_add(more) <= max;
        if fits { Ok(()) } else { Err(Status::NoMem) }
    }

    /// How many bytes of RAM count for an address space whose endpoints are attached to nothing and in bypass mode.
    pub(super) fn counted_identity(&self) -> u64 {
        if self.config.bypass { 0 } else { self.identity.mapped_bytes }
    }

    /// What is mapped and counts.
    fn counted_bytes(&self) -> u64 {
        let free = self.identity.mapped_bytes - self.counted_identity();
        let spaces = if free == 0 { 0 } else { self.spaces.iter().filter(|space| space.identity).count() as u64 };
        self.counters.mapped_bytes.saturating_sub(free.saturating_mul(spaces))
    }

    /// How many bytes more are mapped when an endpoint goes from the domain `old` to `new`, which has `content`.
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

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Mappings of device memory. Device memory is either a BAR, mapped for DMA between devices, or a file that the guest sees as memory.
//!
//! Such mappings are rare, and are kept separately from mappings of guest RAM. `MAP_F_MMIO` (virtio 1.3, section 5.13.6.4) requests device
//! memory. A MAP without the flag maps device memory if the guest has no RAM at that address.
//!
//! The host does not report when device memory disappears, so the VMM must announce this in advance with [`Engine::revoke_device_memory`].
//! The mapping is then *dead*: the host maps nothing at its IOVAs any more, but the driver must still unmap the mapping like any other
//! mapping. A dead mapping stays dead even if the guest sees the memory again: the driver has to map the memory again.

use super::{Engine, permissions};
use crate::backend::{DeviceMemoryKind, Permissions};
use crate::counters::Counters;
use crate::domain::Domain;
use crate::mapping::{DeviceMapping, MappedMemory};
use crate::space::{Spaces, device_kind};
use crate::spec::{MAP_F_MMIO, Status};
use crate::state::RestoreError;
use crate::wire;

impl Engine {
    /// Maps device memory for every endpoint of the domain, or for none. The caller has checked everything except the device memory and the
    /// cap on mapped bytes.
    pub(super) fn map_device(&mut self, request: &wire::Map, permissions: Permissions) -> Result<(), Status> {
        let wire::Map { start, last, gpa, .. } = *request;
        let kind = device_kind(&*self.ram, gpa, last - start + 1, permissions).ok_or(Status::Inval)?;
        let domain = self.domains.get(&request.domain).ok_or(Status::NoEnt)?;
        if kind == DeviceMemoryKind::Pages {
            self.check_mapped((last - start + 1).saturating_mul(domain.spaces.len() as u64))?;
        }
        let mapping = DeviceMapping { last, gpa, permissions, kind, live: true };
        let mut outcome = self.map_device_once(request, mapping);
        while outcome == Err(Status::NoMem) && self.make_room(request.domain) {
            outcome = self.map_device_once(request, mapping);
        }
        outcome
    }

    fn map_device_once(&mut self, request: &wire::Map, mapping: DeviceMapping) -> Result<(), Status> {
        let wire::Map { start, last, .. } = *request;
        let domain = self.domains.get_mut(&request.domain).ok_or(Status::NoEnt)?;
        let (len, memory) = (last - start + 1, MappedMemory::Device(mapping.kind));
        for (place, &id) in domain.spaces.iter().enumerate() {
            let outcome = self.spaces.get_mut(id).map_device(start, &mapping, &*self.ram, &mut self.counters);
            if let Err(status) = outcome {
                for &done in &domain.spaces[..place] {
                    self.spaces.get_mut(done).discard(start, len, memory, &mut self.counters);
                }
                return Err(status);
            }
        }
        domain.remember_device(start, mapping);
        self.counters.mappings += 1;
        Ok(())
    }

    /// Maps the device memory of the state that [`restore`](Self::restore) received. Call this function after all devices are restored,
    /// because only then does the guest see their memory.
    ///
    /// # Errors
    /// A [`RestoreError`] that names the failed mapping. Mappings that were restored before the failed mapping stay.
    pub fn restore_device_memory(&mut self) -> Result<(), RestoreError> {
        // Lift the cap for a moment: if the cap was lowered, the saved mappings may exceed it.
        let max_mapped_bytes = std::mem::replace(&mut self.config.limits.max_mapped_bytes, u64::MAX);
        let requests = std::mem::take(&mut self.restored_devices);
        let outcome = requests.iter().try_for_each(|request| {
            self.restore_device(request).map_err(|status| {
                let what = format!("mapping of device memory at {:#x}", request.start);
                RestoreError::Domain { domain: request.domain, what, status }
            })
        });
        self.config.limits.max_mapped_bytes = max_mapped_bytes;
        outcome
    }

    fn restore_device(&mut self, request: &wire::Map) -> Result<(), Status> {
        self.check_mapping_feature()?;
        let permissions = permissions(request.flags & !MAP_F_MMIO)?;
        self.map_checked(request, permissions, true)
    }

    /// Unmaps the device memory at `[gpa, gpa + len)` for all endpoints, before the memory disappears from the guest's view.
    /// [`GuestRam::device`](crate::GuestRam::device) must no longer return this memory. Returns `false` if the host fails to unmap the
    /// memory. In this case, an endpoint may still access the memory, so the memory must not be reused. Call this function again to retry
    /// the unmap.
    pub fn revoke_device_memory(&mut self, gpa: u64, len: u64) -> bool {
        self.retry_stuck();
        let end = gpa.saturating_add(len);
        for domain in self.domains.values_mut() {
            let touched = domain.devices.iter_mut().filter(|(iova, mapping)| {
                mapping.live && mapping.gpa < end && mapping.gpa + (mapping.last - **iova) >= gpa
            });
            for (&iova, mapping) in touched {
                domain.mapped_bytes -= mapping.capped_bytes(iova);
                mapping.live = false;
                let (len, memory) = (mapping.last - iova + 1, MappedMemory::Device(mapping.kind));
                for &id in &domain.spaces {
                    self.spaces.get_mut(id).discard(iova, len, memory, &mut self.counters);
                }
            }
        }
        !self.spaces.iter().any(|space| space.holds_device_memory())
    }
}

/// Unmaps the device memory in a range that splits no mapping. Ranges that the host fails to unmap become stuck.
pub(super) fn unmap_devices(
    spaces: &mut Spaces,
    domain: &mut Domain,
    (start, last): (u64, u64),
    counters: &mut Counters,
) {
    while let Some((iova, mapping)) = domain.last_device(start, last) {
        if mapping.live {
            let (len, memory) = (mapping.last - iova + 1, MappedMemory::Device(mapping.kind));
            for &id in &domain.spaces {
                spaces.get_mut(id).discard(iova, len, memory, counters);
            }
        }
        domain.forget_device(iova);
        counters.mappings -= 1;
    }
}

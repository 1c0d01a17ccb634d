// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Mappings of other devices' memory, for DMA from device to device (`MAP_F_MMIO`, virtio 1.3, section 5.13.6.4).
//!
//! They are few, and kept apart from those of guest RAM. The host does not tell when a device's memory goes, so the
//! VMM says so before: [`Engine::revoke_device_memory`]. The mapping is *dead* then: the host maps nothing there any
//! more, but the driver must still unmap it like any other. It stays dead when the guest sees the memory again: the
//! driver has to map it anew.

use super::Engine;
use crate::backend::Permissions;
use crate::counters::Counters;
use crate::domain::Domain;
use crate::mapping::{DeviceMapping, MappedMemory};
use crate::space::Spaces;
use crate::spec::Status;
use crate::wire;

impl Engine {
    /// Maps a device's memory for every endpoint of the domain, or for none. All but the memory has been checked.
    pub(super) fn map_device(&mut self, request: &wire::Map, permissions: Permissions) -> Result<(), Status> {
        let wire::Map { start, last, gpa, .. } = *request;
        let mapping = DeviceMapping { last, gpa, permissions, live: true };
        let domain = self.domains.get_mut(&request.domain).ok_or(Status::NoEnt)?;
        for (place, &id) in domain.spaces.iter().enumerate() {
            let outcome = self.spaces.get_mut(id).map_device(start, &mapping, &*self.ram, &mut self.counters);
            if let Err(status) = outcome {
                for &done in &domain.spaces[..place] {
                    self.spaces.get_mut(done).discard(
                        start,
                        last - start + 1,
                        MappedMemory::Device,
                        &mut self.counters,
                    );
                }
                return Err(status);
            }
        }
        domain.devices.insert(start, mapping);
        self.counters.mappings += 1;
        Ok(())
    }

    /// Unmaps the device memory at `[gpa, gpa + len)` for all endpoints, before the guest's view of it goes.
    /// [`GuestRam::device`](crate::GuestRam::device) must no longer give it out. `false` if the host refuses: then an
    /// endpoint may still reach the memory, so nobody else may get it. Another call tries again.
    pub fn revoke_device_memory(&mut self, gpa: u64, len: u64) -> bool {
        self.retry_stuck();
        let end = gpa.saturating_add(len);
        for domain in self.domains.values_mut() {
            let touched = domain.devices.iter_mut().filter(|(iova, mapping)| {
                mapping.live && mapping.gpa < end && mapping.gpa + (mapping.last - **iova) >= gpa
            });
            for (&iova, mapping) in touched {
                mapping.live = false;
                for &id in &domain.spaces {
                    let len = mapping.last - iova + 1;
                    self.spaces.get_mut(id).discard(iova, len, MappedMemory::Device, &mut self.counters);
                }
            }
        }
        !self.spaces.iter().any(|space| space.holds_device_memory())
    }
}

/// Unmaps the device memory in a range, which cuts no mapping. What the host keeps is stuck.
pub(super) fn unmap_devices(
    spaces: &mut Spaces,
    domain: &mut Domain,
    (start, last): (u64, u64),
    counters: &mut Counters,
) {
    while let Some((iova, mapping)) = domain.last_device(start, last) {
        if mapping.live {
            for &id in &domain.spaces {
                spaces.get_mut(id).discard(iova, mapping.last - iova + 1, MappedMemory::Device, counters);
            }
        }
        domain.devices.remove(&iova);
        counters.mappings -= 1;
    }
}

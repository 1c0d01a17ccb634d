// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! MAP and UNMAP (virtio 1.3, sections 5.13.6.4 and 5.13.6.5).

use super::device::unmap_devices;
use super::{Engine, permissions};
use crate::backend::{DeviceMemoryKind, GuestRam, Permissions};
use crate::counters::Counters;
use crate::domain::{Cover, Domain};
use crate::mapping::{MappedMemory, Mapping};
use crate::space::{Spaces, device_kind};
use crate::spec::{MAP_F_MMIO, Status, feature};
use crate::wire;
use crate::{DomainId, SpaceId};

impl Engine {
    /// Maps memory for every endpoint of the domain, or for none. Linux sets the MMIO flag only for `dma_map_resource()`
    /// (`drivers/iommu/dma-iommu.c`), so VFIO and direct I/O in the guest map device memory without the flag.
    pub(super) fn map(&mut self, request: wire::Map) -> Result<(), Status> {
        self.check_mapping_feature()?;
        // Without the feature `MMIO`, the MMIO flag is an unknown flag and gets `INVAL`.
        let mmio = request.flags & MAP_F_MMIO != 0 && self.accepted & feature::MMIO != 0;
        let permissions = permissions(if mmio { request.flags & !MAP_F_MMIO } else { request.flags })?;
        self.map_checked(&request, permissions, mmio)
    }

    /// Maps device memory if `only_device` is true. Otherwise maps guest RAM, or device memory where the guest has no RAM.
    pub(super) fn map_checked(
        &mut self,
        request: &wire::Map,
        permissions: Permissions,
        only_device: bool,
    ) -> Result<(), Status> {
        let wire::Map { start, last, .. } = *request;
        self.check_place(start, last)?;
        self.check_alignment(request)?;
        let domain = self.domains.get(&request.domain).ok_or(Status::NoEnt)?;
        if domain.bypass {
            return Err(Status::Inval);
        }
        if self.is_stuck(domain) {
            return Err(Status::DevErr);
        }
        if domain.is_mapped(start, last) {
            return Err(Status::Inval);
        }
        let can_map = |id| {
            let endpoint = self.endpoints.get(id);
            endpoint.is_some_and(|endpoint| endpoint.can_map(start, last))
        };
        if !domain.endpoints.iter().all(can_map) {
            return Err(Status::Range);
        }
        if self.counters.mappings >= self.config.limits.max_mappings as u64 {
            return Err(Status::NoMem);
        }
        self.check_unmap_time(domain)?;
        if only_device {
            return self.map_device(request, permissions);
        }
        // The length fits in 64 bits, because `check_alignment` has succeeded. The total over all address spaces may not fit, so the
        // multiplication saturates.
        if let Err(status) = self.check_mapped((last - start + 1).saturating_mul(domain.spaces.len() as u64)) {
            // Registers do not count towards the cap.
            let kind = device_kind(&*self.ram, request.gpa, last - start + 1, permissions);
            let registers = kind == Some(DeviceMemoryKind::Registers);
            return if registers { self.map_device(request, permissions) } else { Err(status) };
        }
        let mapping = Mapping { last, gpa: request.gpa, permissions };
        loop {
            let domain = self.domains.get_mut(&request.domain).ok_or(Status::NoEnt)?;
            let (ram, counters) = (&*self.ram, &mut self.counters);
            match map_all(&mut self.spaces, &domain.spaces, start, &mapping, ram, counters) {
                Ok(()) => {
                    domain.remember(start, mapping);
                    break;
                }
                Err(Status::NoMem) if self.make_room(request.domain) => {}
                // The guest has no RAM at this address, and nothing was mapped.
                Err(Status::Inval) => return self.map_device(request, permissions),
                Err(status) => return Err(status),
            }
        }
        self.counters.mappings += 1;
        Ok(())
    }

    pub(super) fn check_mapping_feature(&self) -> Result<(), Status> {
        if self.accepted & feature::MAP_UNMAP == 0 {
            return Err(Status::Unsupp);
        }
        Ok(())
    }

    /// Checks that a mapping may lie in `[start, last]`: the range must not be empty, and must not touch the aperture of active
    /// windows.
    fn check_place(&self, start: u64, last: u64) -> Result<(), Status> {
        if last < start {
            return Err(Status::Inval);
        }
        let windows = self.active_windows();
        if windows.is_some_and(|windows| windows.touches_aperture(start, last)) {
            return Err(Status::Range);
        }
        Ok(())
    }

    /// Checks that a MAP is aligned to the granule and lies within valid addresses.
    fn check_alignment(&self, request: &wire::Map) -> Result<(), Status> {
        let wire::Map { start, last, gpa, .. } = *request;
        let mask = self.config.granule() - 1;
        if (start | gpa | last.wrapping_add(1)) & mask != 0 {
            return Err(Status::Range);
        }
        let input = &self.config.input_range;
        if start < *input.start() || last > *input.end() {
            return Err(Status::Range);
        }
        // A length of 2^64, or memory that ends beyond the last address, does not fit in 64 bits.
        let len = (last - start).checked_add(1);
        len.and_then(|len| gpa.checked_add(len - 1)).ok_or(Status::Inval)?;
        Ok(())
    }

    /// Removes all mappings in a range. The range must not split a mapping.
    ///
    /// If the host fails to unmap a range, the status is `DEVERR`. The range then stays mapped for all endpoints, and the driver can retry
    /// the request.
    pub(super) fn unmap(&mut self, request: wire::Unmap) -> Result<(), Status> {
        let wire::Unmap { start, last, .. } = request;
        let cover = self.check_unmap(&request)?;
        let domain = self.domains.get_mut(&request.domain).ok_or(Status::NoEnt)?;
        let (ram, counters) = (&*self.ram, &mut self.counters);
        match cover {
            Cover::Nothing => {}
            Cover::One(end) => {
                unmap_run(&mut self.spaces, domain, (start, end), ram, counters)?;
            }
            Cover::Several => {
                while let Some(run) = domain.run(start, last) {
                    unmap_run(&mut self.spaces, domain, run, ram, counters)?;
                }
                unmap_devices(&mut self.spaces, domain, (start, last), counters);
            }
        }
        self.check_unstuck(request.domain, start, last)
    }

    /// Returns the mappings that an UNMAP would remove. The range must not split a mapping.
    pub(super) fn check_unmap(&self, request: &wire::Unmap) -> Result<Cover, Status> {
        let wire::Unmap { start, last, .. } = *request;
        self.check_mapping_feature()?;
        if request.reserved != 0 {
            return Err(Status::Inval);
        }
        self.check_place(start, last)?;
        let domain = self.domains.get(&request.domain).ok_or(Status::NoEnt)?;
        if domain.bypass {
            return Err(Status::Inval);
        }
        domain.cover(start, last).ok_or(Status::Range)
    }

    /// Returns `DEVERR` if a stuck range of the domain overlaps `[start, last]`.
    pub(super) fn check_unstuck(&self, domain: DomainId, start: u64, last: u64) -> Result<(), Status> {
        if self.counters.stuck_ranges == 0 {
            return Ok(());
        }
        let domain = self.domains.get(&domain).ok_or(Status::NoEnt)?;
        let stuck = |space: &SpaceId| self.spaces.get(*space).is_stuck_in(start, last);
        if domain.spaces.iter().any(stuck) { Err(Status::DevErr) } else { Ok(()) }
    }
}

/// Maps guest RAM in all of the address spaces, or in none.
fn map_all(
    spaces: &mut Spaces,
    ids: &[SpaceId],
    iova: u64,
    mapping: &Mapping,
    ram: &dyn GuestRam,
    counters: &mut Counters,
) -> Result<(), Status> {
    for (place, &id) in ids.iter().enumerate() {
        let outcome = spaces.get_mut(id).map_ram(iova, mapping, ram, counters);
        if let Err(status) = outcome {
            let len = mapping.last - iova + 1;
            for &done in &ids[..place] {
                spaces.get_mut(done).discard(iova, len, MappedMemory::Ram, counters);
            }
            return Err(status);
        }
    }
    Ok(())
}

/// Unmaps adjacent mappings in all address spaces, and removes them from the domain. On an error, the mappings are mapped again. If the
/// host also fails to map them, they are removed from the domain anyway. The ranges that the host still maps then become stuck.
pub(super) fn unmap_run(
    spaces: &mut Spaces,
    domain: &mut Domain,
    (start, last): (u64, u64),
    ram: &dyn GuestRam,
    counters: &mut Counters,
) -> Result<(), Status> {
    let len = last - start + 1;
    let ids = &domain.spaces;
    for (place, &id) in ids.iter().enumerate() {
        let outcome = spaces.get_mut(id).unmap(start, len, MappedMemory::Ram, counters);
        let Err(status) = outcome else {
            continue;
        };
        let restored = remap(spaces, domain, place, (start, last), ram, counters);
        if let Err(still_mapped) = restored {
            let rest = domain.spaces[..still_mapped].iter();
            for &id in rest.chain(&domain.spaces[place..]) {
                spaces.get_mut(id).discard(start, len, MappedMemory::Ram, counters);
            }
            counters.mappings -= domain.forget(start, last);
        }
        return Err(status);
    }
    counters.mappings -= domain.forget(start, last);
    Ok(())
}

/// Maps a run again in the first `count` address spaces of the domain. An error returns the number of address spaces that hold
/// the run again. The other address spaces hold only stuck ranges of the run.
fn remap(
    spaces: &mut Spaces,
    domain: &Domain,
    count: usize,
    (start, last): (u64, u64),
    ram: &dyn GuestRam,
    counters: &mut Counters,
) -> Result<(), usize> {
    for (place, &id) in domain.spaces[..count].iter().enumerate() {
        let space = spaces.get_mut(id);
        for (iova, mapping) in domain.mappings.from(start).take_while(|(iova, _)| *iova <= last) {
            if space.map_ram(iova, &mapping, ram, counters).is_err() {
                if iova > start {
                    space.discard(start, iova - start, MappedMemory::Ram, counters);
                }
                return Err(place);
            }
        }
    }
    Ok(())
}

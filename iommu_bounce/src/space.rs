// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Host address spaces. Each address space has a mapper, and records the ranges that the mapper failed to unmap.
//!
//! Each address space of a domain maps everything that the domain has. In addition, an address space may hold *stuck* ranges: the domain no
//! longer has such a range, but the mapper failed to unmap it. The address space records the range, and each request retries the unmap. A
//! chunk in a stuck range is not reused until an unmap succeeds.

mod devices;

use std::collections::BTreeMap;
use std::time::Duration;

use log::{debug, error, warn};
use vm_memory::VolatileSlice;

pub(crate) use self::devices::device_kind;
use crate::backend::{DmaMapper, GuestRam, MapError, MapperGroup, MapperLimits, UnmapError};
use crate::config::Limits;
use crate::counters::Counters;
use crate::domain::Domain;
use crate::interrupt::Steps;
use crate::latency::Calls;
use crate::mapping::{Chunk, DeviceMapping, MappedMemory, Mapping};
use crate::spec::Status;
use crate::table_pages::TablePages;
use crate::windows::Windows;
use crate::{EndpointId, Permissions, SpaceId};

/// Number of mappings that is always allowed. While there are fewer mappings, too few calls have been timed to estimate the duration of a
/// call.
pub(crate) const ALWAYS: u64 = 4096;

/// Range that the host failed to unmap.
#[derive(Clone, Copy, Debug)]
struct Stuck {
    iova: u64,
    len: u64,
    memory: MappedMemory,
}

impl Stuck {
    fn touches(&self, start: u64, last: u64) -> bool {
        self.iova <= last && self.iova + (self.len - 1) >= start
    }
}

/// Reason why an address space could not switch to another domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExchangeError {
    /// The switch failed, and the address space holds its old content.
    Undone(Status),
    /// The switch failed, and the host could not map the old content again. The address space holds nothing except stuck ranges.
    Lost(Status),
}

/// Host address space with its mapper.
pub(crate) struct Space {
    /// Endpoint that the address space was created for. Log lines name the address space by this endpoint.
    name: EndpointId,
    mapper: Box<dyn DmaMapper>,
    group: Option<MapperGroup>,
    max_mappings: Option<u32>,
    /// Endpoints that are attached to this address space on the host.
    pub(crate) endpoints: Vec<EndpointId>,
    /// True if the address space holds all RAM, for unattached endpoints in bypass mode.
    pub(crate) identity: bool,
    /// Parked chunks by IOVA. They are mapped in this address space, but belong to no domain.
    pub(crate) parked: BTreeMap<u64, Chunk>,
    stuck: Vec<Stuck>,
    /// Estimate of the host's page tables, or `None` if the host keeps no page tables.
    tables: Option<TablePages>,
    /// True if a mapping was rejected because of the limit on page tables.
    tables_were_full: bool,
    steps: Steps,
    maps: Calls,
    unmaps: Calls,
    /// True while all RAM is being mapped. The durations of these calls do not count: a call for 1 GiB does not predict calls for a
    /// driver's mappings.
    in_bypass: bool,
    max_unmap_time: Duration,
}

/// All address spaces. Each group has as many address spaces as endpoints.
#[derive(Default)]
pub(crate) struct Spaces(Vec<Option<Space>>);

impl Spaces {
    /// Adds an address space.
    pub(crate) fn insert(&mut self, space: Space) -> SpaceId {
        let free = self.0.iter().position(Option::is_none).unwrap_or_else(|| {
            self.0.push(None);
            self.0.len() - 1
        });
        self.0[free] = Some(space);
        free
    }

    /// Removes an address space.
    pub(crate) fn remove(&mut self, id: SpaceId) -> Option<Space> {
        self.0.get_mut(id)?.take()
    }

    /// Returns an address space that must exist.
    pub(crate) fn get(&self, id: SpaceId) -> &Space {
        self.0[id].as_ref().expect("an address space is removed only when it has no endpoint")
    }

    /// Returns an address space that must exist.
    pub(crate) fn get_mut(&mut self, id: SpaceId) -> &mut Space {
        self.0[id].as_mut().expect("an address space is removed only when it has no endpoint")
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Space> {
        self.0.iter().flatten()
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Space> {
        self.0.iter_mut().flatten()
    }

    /// Returns the IDs of all address spaces.
    pub(crate) fn ids(&self) -> Vec<SpaceId> {
        let taken = self.0.iter().enumerate().filter(|(_, space)| space.is_some());
        taken.map(|(id, _)| id).collect()
    }

    /// Returns a spare address space of the group, which has no endpoints. Prefers an address space without stuck ranges.
    pub(crate) fn spare(&self, group: Option<MapperGroup>) -> Option<SpaceId> {
        let wanted = group?;
        let spaces = self.0.iter().enumerate();
        let spares = spaces.filter_map(|(id, space)| {
            let space = space.as_ref().filter(|space| space.group == Some(wanted) && space.endpoints.is_empty())?;
            Some((space.is_stuck(), id))
        });
        spares.min().map(|(_, id)| id)
    }

    /// Moves an endpoint to another address space of its group.
    pub(crate) fn adopt(
        &mut self,
        endpoint: EndpointId,
        from: SpaceId,
        to: SpaceId,
        counters: &mut Counters,
    ) -> Result<(), Status> {
        self.get_mut(to).mapper.adopt(endpoint).map_err(|error| {
            counters.host_errors += 1;
            warn!("virtio-iommu: cannot move endpoint {endpoint:#x} to another address space of the host: {error}");
            Status::DevErr
        })?;
        self.get_mut(from).endpoints.retain(|other| *other != endpoint);
        self.get_mut(to).endpoints.push(endpoint);
        Ok(())
    }
}

/// Returns the longest part of guest RAM at `gpa` that is contiguous in the host, or `None` if there is no RAM.
fn part(ram: &dyn GuestRam, gpa: u64, len: u64) -> Option<VolatileSlice<'_>> {
    let part = ram.prefix(gpa, len)?;
    let fits = !part.is_empty() && part.len() as u64 <= len;
    fits.then_some(part)
}

/// True if `[gpa, gpa + len)` is guest RAM, in any number of parts.
fn is_ram(ram: &dyn GuestRam, gpa: u64, len: u64) -> bool {
    let mut done = 0;
    while done < len {
        let at = gpa.checked_add(done);
        let Some(part) = at.and_then(|at| part(ram, at, len - done)) else {
            return false;
        };
        done += part.len() as u64;
    }
    true
}

/// Mapping or chunk of a domain.
enum DomainPart<'w> {
    Ram(Mapping),
    Device(DeviceMapping),
    Chunk(Chunk, &'w Windows),
}

impl DomainPart<'_> {
    fn memory(&self) -> MappedMemory {
        match self {
            Self::Ram(_) => MappedMemory::Ram,
            Self::Device(mapping) => MappedMemory::Device(mapping.kind),
            Self::Chunk(chunk, _) => MappedMemory::Chunk(chunk.index),
        }
    }
}

/// Returns all mappings and chunks of a domain, with IOVA and length.
fn parts<'d>(domain: &'d Domain, windows: Option<&'d Windows>) -> impl Iterator<Item = (u64, u64, DomainPart<'d>)> {
    let mappings =
        domain.mappings.iter().map(|(iova, mapping)| (iova, mapping.last - iova + 1, DomainPart::Ram(mapping)));
    let chunks = windows.into_iter().flat_map(|windows| {
        let chunk = |(&iova, &chunk)| (iova, windows.chunk_size(), DomainPart::Chunk(chunk, windows));
        domain.chunks.iter().map(chunk)
    });
    mappings.chain(devices(domain)).chain(chunks)
}

/// Returns the device memory that a domain maps, with IOVA and length.
fn devices(domain: &Domain) -> impl Iterator<Item = (u64, u64, DomainPart<'_>)> {
    let live = domain.devices.iter().filter(|(_, mapping)| mapping.live);
    live.map(|(&iova, mapping)| (iova, mapping.last - iova + 1, DomainPart::Device(*mapping)))
}

impl Space {
    /// Creates the address space of a new endpoint.
    pub(crate) fn new(
        endpoint: EndpointId,
        mapper: Box<dyn DmaMapper>,
        limits: &MapperLimits,
        own: &Limits,
        steps: Steps,
    ) -> Self {
        let group = mapper.group();
        let tables = mapper.keeps_page_tables().then(|| TablePages::new(own.max_table_pages));
        let max_mappings = limits.max_mappings;
        Self {
            name: endpoint,
            mapper,
            group,
            max_mappings,
            endpoints: vec![endpoint],
            identity: false,
            parked: BTreeMap::new(),
            stuck: Vec::new(),
            tables,
            tables_were_full: false,
            steps,
            maps: Calls::default(),
            unmaps: Calls::default(),
            in_bypass: false,
            max_unmap_time: own.max_unmap_time,
        }
    }

    /// Returns the endpoint that the address space was created for.
    pub(crate) fn name(&self) -> EndpointId {
        self.name
    }

    /// Returns the group of the address space.
    pub(crate) fn group(&self) -> Option<MapperGroup> {
        self.group
    }

    /// Returns the mapper. `counters` no longer counts the stuck ranges, because the host unmaps them when the mapper is dropped.
    pub(crate) fn into_mapper(self, counters: &mut Counters) -> Box<dyn DmaMapper> {
        for stuck in &self.stuck {
            counters.stuck_ranges -= 1;
            counters.forget_mapped(stuck.memory, stuck.len, self.tables.is_some());
        }
        self.mapper
    }

    /// True if the host kernel pins mapped memory. The kernel pins memory only for an IOMMU of the host, which also needs page tables.
    pub(crate) fn pins(&self) -> bool {
        self.tables.is_some()
    }

    /// Returns [`DmaMapper::maps_hidden_chunks`] of the mapper.
    pub(crate) fn maps_hidden_chunks(&self) -> bool {
        self.mapper.maps_hidden_chunks()
    }

    /// True if the host's limit on mappings leaves room for the whole domain.
    pub(crate) fn has_room_for(&self, domain: &Domain) -> bool {
        let wanted = domain.mappings.len() + domain.devices.len() + domain.chunks.len() + self.parked.len();
        self.max_mappings.is_none_or(|max| wanted <= usize::try_from(max).unwrap_or(usize::MAX))
    }

    /// True if a range is stuck in this address space.
    pub(crate) fn is_stuck(&self) -> bool {
        !self.stuck.is_empty()
    }

    /// True if a range in `[start, last]` is stuck.
    pub(crate) fn is_stuck_in(&self, start: u64, last: u64) -> bool {
        self.stuck.iter().any(|stuck| stuck.touches(start, last))
    }

    /// Returns the chunks that are stuck in this address space.
    pub(crate) fn stuck_chunks(&self) -> impl Iterator<Item = u32> {
        self.stuck.iter().filter_map(|stuck| match stuck.memory {
            MappedMemory::Chunk(index) => Some(index),
            MappedMemory::Ram | MappedMemory::Device(_) => None,
        })
    }

    /// True if the chunk is stuck in this address space.
    pub(crate) fn holds_chunk(&self, index: u32) -> bool {
        self.stuck_chunks().any(|stuck| stuck == index)
    }

    /// Returns the nanoseconds of a typical map or unmap call, whichever takes longer. Returns 0 while neither is known.
    pub(crate) fn call_ns(&self) -> u64 {
        self.maps.typical_ns.max(self.unmaps.typical_ns)
    }

    /// True if unmapping the domain in this address space would take too long.
    fn is_slow_for(&self, domain: &Domain) -> bool {
        let time = Duration::from_nanos(domain.count().saturating_mul(self.call_ns()));
        domain.count() > ALWAYS && time > self.max_unmap_time
    }

    fn map(
        &mut self,
        iova: u64,
        slice: VolatileSlice<'_>,
        permissions: Permissions,
        memory: MappedMemory,
        counters: &mut Counters,
    ) -> Result<(), Status> {
        let len = slice.len() as u64;
        if self.tables.as_mut().is_some_and(|tables| !tables.touch(iova, iova + (len - 1))) {
            if !self.tables_were_full {
                self.tables_were_full = true;
                warn!(
                    "virtio-iommu: endpoint {:#x}: MAP requests at new addresses fail, because the host's page tables for the endpoint have reached their maximum size",
                    self.name
                );
            }
            return Err(Status::NoMem);
        }
        let began = self.maps.begin();
        let outcome = self.mapper.map(iova, slice, permissions);
        // Without an attached device, the host may postpone the work of the call, so the duration does not count.
        let counts = outcome.is_ok() && !self.in_bypass && !self.endpoints.is_empty();
        self.maps.end(began, counts, &mut counters.host.map);
        match outcome {
            Ok(()) => {
                counters.note_mapped(memory, len, self.pins());
                Ok(())
            }
            Err(error) => {
                counters.host_errors += 1;
                // The log level is not `warn`, because a guest can cause any number of such errors.
                debug!("virtio-iommu: endpoint {:#x}: cannot map {len:#x} bytes at IOVA {iova:#x}: {error}", self.name);
                Err(match error {
                    MapError::NoResources => Status::NoMem,
                    MapError::Exists | MapError::Host(_) => Status::DevErr,
                })
            }
        }
    }

    /// Maps guest RAM, with one call for each part that is contiguous in the host, and one call for each [step](Steps) of a long part.
    /// After an error, nothing of the range is mapped except stuck ranges.
    pub(crate) fn map_ram(
        &mut self,
        iova: u64,
        mapping: &Mapping,
        ram: &dyn GuestRam,
        counters: &mut Counters,
    ) -> Result<(), Status> {
        let len = mapping.last - iova + 1;
        let slice = ram.slice(mapping.gpa, len);
        if let Some(slice) = slice.filter(|_| !self.steps.are_for(len)) {
            return self.map(iova, slice, mapping.permissions, MappedMemory::Ram, counters);
        }
        if !is_ram(ram, mapping.gpa, len) {
            return Err(Status::Inval);
        }
        let mut done = 0;
        while done < len {
            let at = iova + done;
            let in_steps = self.steps.are_for(len);
            let most = if in_steps { self.steps.len_at(at, len - done) } else { len - done };
            let ends = in_steps && self.steps.end_here();
            let part = part(ram, mapping.gpa + done, most).ok_or(Status::Inval);
            let outcome = if ends { Err(Status::DevErr) } else { part }.and_then(|part| {
                self.map(at, part, mapping.permissions, MappedMemory::Ram, counters)?;
                Ok(part.len() as u64)
            });
            match outcome {
                Ok(more) => done += more,
                Err(status) => {
                    if done > 0 {
                        self.discard(iova, done, MappedMemory::Ram, counters);
                    }
                    return Err(status);
                }
            }
        }
        Ok(())
    }

    /// Maps a chunk.
    pub(crate) fn map_chunk(
        &mut self,
        iova: u64,
        chunk: Chunk,
        windows: &Windows,
        counters: &mut Counters,
    ) -> Result<(), Status> {
        let slice = windows.memory(chunk.index).ok_or(Status::DevErr)?;
        let memory = MappedMemory::Chunk(chunk.index);
        self.map(iova, slice, chunk.permissions, memory, counters)
    }

    fn try_unmap(
        &mut self,
        iova: u64,
        len: u64,
        memory: MappedMemory,
        counters: &mut Counters,
    ) -> Result<(), UnmapError> {
        let began = self.unmaps.begin();
        let outcome = self.mapper.unmap(iova, len);
        self.unmaps.end(began, outcome.is_ok() && !self.endpoints.is_empty(), &mut counters.host.unmap);
        match outcome {
            Ok(()) => counters.note_unmapped(memory, len, self.pins()),
            Err(_) => counters.host_errors += 1,
        }
        outcome
    }

    /// Unmaps one or more complete mappings, or a chunk. After an error, the whole range is still mapped.
    pub(crate) fn unmap(
        &mut self,
        iova: u64,
        len: u64,
        memory: MappedMemory,
        counters: &mut Counters,
    ) -> Result<(), Status> {
        self.try_unmap(iova, len, memory, counters).map_err(|error| {
            warn!("virtio-iommu: endpoint {:#x}: cannot unmap {len:#x} bytes at IOVA {iova:#x}: {error}", self.name);
            Status::DevErr
        })
    }

    /// Unmaps a range that no domain owns any more. If the host fails, the range becomes stuck.
    pub(crate) fn discard(&mut self, iova: u64, len: u64, memory: MappedMemory, counters: &mut Counters) {
        if let Err(error) = self.try_unmap(iova, len, memory, counters) {
            error!(
                "virtio-iommu: endpoint {:#x}: {len:#x} bytes at IOVA {iova:#x} stay mapped until a later retry succeeds: {error}",
                self.name
            );
            counters.stuck_ranges += 1;
            self.stuck.push(Stuck { iova, len, memory });
        }
    }

    /// Retries the unmap of stuck ranges.
    pub(crate) fn retry_stuck(&mut self, counters: &mut Counters) {
        let stuck = std::mem::take(&mut self.stuck);
        for range in stuck {
            let outcome = self.try_unmap(range.iova, range.len, range.memory, counters);
            match outcome {
                Ok(()) => counters.stuck_ranges -= 1,
                Err(_) => self.stuck.push(range),
            }
        }
    }

    /// Maps everything that a domain has, except where a range is stuck. On an error, the new mappings are unmapped again, and ranges that
    /// the host fails to unmap become stuck. Also fails if map calls turn out to be too slow for the number of mappings. The caller cannot
    /// check this in advance while the duration of a call is unknown.
    pub(crate) fn install(
        &mut self,
        domain: &Domain,
        ram: &dyn GuestRam,
        windows: Option<&Windows>,
        counters: &mut Counters,
    ) -> Result<(), Status> {
        self.install_checked(true, domain, ram, windows, counters)
    }

    fn install_checked(
        &mut self,
        timed: bool,
        domain: &Domain,
        ram: &dyn GuestRam,
        windows: Option<&Windows>,
        counters: &mut Counters,
    ) -> Result<(), Status> {
        let mut done = Vec::new();
        for (iova, len, part) in parts(domain, windows) {
            if self.is_stuck_in(iova, iova + (len - 1)) {
                continue;
            }
            let slow = timed && (done.len() as u64).is_multiple_of(ALWAYS) && self.is_slow_for(domain);
            self.in_bypass = domain.bypass;
            let outcome = match part {
                _ if slow => Err(Status::NoMem),
                DomainPart::Ram(mapping) => self.map_ram(iova, &mapping, ram, counters),
                DomainPart::Device(mapping) => self.map_device(iova, &mapping, ram, counters),
                DomainPart::Chunk(chunk, windows) => self.map_chunk(iova, chunk, windows, counters),
            };
            self.in_bypass = false;
            if let Err(status) = outcome {
                done.into_iter().for_each(|(iova, len, memory)| self.discard(iova, len, memory, counters));
                return Err(status);
            }
            done.push((iova, len, part.memory()));
        }
        Ok(())
    }

    /// Maps again what [`withdraw`](Self::withdraw) unmapped. Stuck ranges count as mapped again. After an error, nothing is
    /// mapped except stuck ranges.
    pub(crate) fn restore(
        &mut self,
        domain: &Domain,
        ram: &dyn GuestRam,
        windows: Option<&Windows>,
        counters: &mut Counters,
    ) -> Result<(), Status> {
        self.install_checked(false, domain, ram, windows, counters)?;
        counters.stuck_ranges -= self.stuck.len() as u64;
        self.stuck.clear();
        Ok(())
    }

    /// Replaces all mappings of `old` by the mappings of `new`.
    pub(crate) fn exchange(
        &mut self,
        old: Option<&Domain>,
        new: &Domain,
        ram: &dyn GuestRam,
        windows: Option<&Windows>,
        counters: &mut Counters,
    ) -> Result<(), ExchangeError> {
        let Some(old) = old else {
            return self.install(new, ram, windows, counters).map_err(ExchangeError::Undone);
        };
        self.withdraw(old, windows, counters);
        let status = if self.is_stuck() {
            Status::DevErr
        } else {
            let Err(status) = self.install(new, ram, windows, counters) else { return Ok(()) };
            if self.is_stuck() {
                // The stuck range belongs to the new domain, and may overlap a mapping of the old domain.
                return Err(ExchangeError::Lost(status));
            }
            status
        };
        // The stuck ranges belong to the old domain, so `restore` counts them as mapped again. A waiting thread cannot interrupt this step.
        let allowed = self.steps.set_allowed(false);
        let restored = self.restore(old, ram, windows, counters);
        self.steps.set_allowed(allowed);
        match restored {
            Ok(()) => Err(ExchangeError::Undone(status)),
            Err(_) => Err(ExchangeError::Lost(status)),
        }
    }

    /// Unmaps everything of a domain except its chunks. Ranges that the host fails to unmap become stuck.
    pub(crate) fn withdraw_ram(&mut self, domain: &Domain, counters: &mut Counters) {
        for (start, last) in domain.runs() {
            self.discard(start, last - start + 1, MappedMemory::Ram, counters);
        }
        for (iova, len, part) in devices(domain) {
            self.discard(iova, len, part.memory(), counters);
        }
    }

    /// Unmaps everything of a domain. Ranges that the host fails to unmap become stuck.
    pub(crate) fn withdraw(&mut self, domain: &Domain, windows: Option<&Windows>, counters: &mut Counters) {
        self.withdraw_ram(domain, counters);
        if let Some(windows) = windows {
            for (&iova, chunk) in &domain.chunks {
                let memory = MappedMemory::Chunk(chunk.index);
                self.discard(iova, windows.chunk_size(), memory, counters);
            }
        }
    }
}

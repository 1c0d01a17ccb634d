// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! WINDOW_ADD and WINDOW_DEL (docs/bounce-windows.md, Requests).

use super::{Engine, permissions};
use crate::DomainId;
use crate::backend::Permissions;
use crate::mapping::{Chunk, MappedMemory};
use crate::spec::Status;
use crate::wire;

impl Engine {
    /// Backs a chunk and maps it for every endpoint of the domain, or does nothing. Returns the offset of the chunk in the shared
    /// region.
    pub(super) fn window_add(&mut self, request: wire::WindowAdd) -> Result<u64, Status> {
        let iova = request.iova;
        let windows = self.active_windows().ok_or(Status::Unsupp)?;
        if request.reserved != 0 {
            return Err(Status::Inval);
        }
        let permissions = permissions(request.flags)?;
        if !windows.is_place(iova) {
            return Err(Status::Range);
        }
        let domain = self.domains.get(&request.domain).ok_or(Status::NoEnt)?;
        if domain.bypass || domain.chunks.contains_key(&iova) {
            return Err(Status::Inval);
        }
        self.recover_lost();
        let chunk = match self.unpark(request.domain, iova, permissions) {
            Some(chunk) => chunk,
            None => self.add_chunk(request.domain, iova, permissions)?,
        };
        let domain = self.domains.get_mut(&request.domain).ok_or(Status::NoEnt)?;
        domain.chunks.insert(iova, chunk);
        let windows = self.windows.as_ref().ok_or(Status::Unsupp)?;
        Ok(windows.offset(chunk.index))
    }

    /// Retries the release of one lost chunk. Only one chunk is retried, so that the duration of a request is bounded.
    fn recover_lost(&mut self) {
        if let Some(windows) = &mut self.windows {
            windows.recover(&mut self.counters);
        }
    }

    /// Backs a chunk and maps it for a domain, or does nothing.
    fn add_chunk(&mut self, domain: DomainId, iova: u64, permissions: Permissions) -> Result<Chunk, Status> {
        if self.domains.get(&domain).is_some_and(|domain| self.is_stuck(domain)) {
            return Err(Status::DevErr);
        }
        let index = loop {
            let windows = self.windows.as_mut().ok_or(Status::Unsupp)?;
            match windows.back(&mut self.counters) {
                Err(Status::NoMem) if self.make_room(domain) => {}
                outcome => break outcome?,
            }
        };
        let chunk = Chunk { index, permissions };
        let mut outcome = self.map_chunk(domain, iova, chunk);
        while outcome == Err(Status::NoMem) && self.make_room(domain) {
            outcome = self.map_chunk(domain, iova, chunk);
        }
        if let Err(status) = outcome {
            self.give_back(index);
            return Err(status);
        }
        Ok(chunk)
    }

    /// Maps a chunk in all address spaces of a domain, or in none.
    pub(super) fn map_chunk(&mut self, domain: u32, iova: u64, chunk: Chunk) -> Result<(), Status> {
        let domain = self.domains.get(&domain).ok_or(Status::NoEnt)?;
        let windows = self.windows.as_ref().ok_or(Status::Unsupp)?;
        let (len, memory) = (windows.chunk_size(), MappedMemory::Chunk(chunk.index));
        for (place, &id) in domain.spaces.iter().enumerate() {
            let space = self.spaces.get_mut(id);
            let outcome = space.map_chunk(iova, chunk, windows, &mut self.counters);
            if let Err(status) = outcome {
                for &done in &domain.spaces[..place] {
                    let space = self.spaces.get_mut(done);
                    space.discard(iova, len, memory, &mut self.counters);
                }
                return Err(status);
            }
        }
        Ok(())
    }

    /// Unmaps a chunk for every endpoint of the domain and releases it. If the host fails to unmap the chunk, the chunk stays in the
    /// domain.
    pub(super) fn window_del(&mut self, request: wire::WindowDel) -> Result<(), Status> {
        let iova = request.iova;
        let windows = self.active_windows().ok_or(Status::Unsupp)?;
        if request.reserved != [0; 3] {
            return Err(Status::Inval);
        }
        if !windows.is_place(iova) {
            return Err(Status::Range);
        }
        let domain = self.domains.get(&request.domain).ok_or(Status::NoEnt)?;
        let chunk = *domain.chunks.get(&iova).ok_or(Status::NoEnt)?;
        self.recover_lost();
        let (outcome, stays) = self.unmap_chunk(request.domain, iova, chunk);
        if !stays {
            if let Some(domain) = self.domains.get_mut(&request.domain) {
                domain.chunks.remove(&iova);
            }
            self.give_back(chunk.index);
        }
        outcome
    }

    /// Unmaps a chunk in all address spaces of a domain. Returns the outcome, and true if the chunk is still mapped. On an error, the chunk
    /// is mapped again in the address spaces where it was unmapped. If the host also fails to map the chunk, the chunk is removed from the
    /// domain. The ranges that the host still maps then become stuck.
    fn unmap_chunk(&mut self, domain: u32, iova: u64, chunk: Chunk) -> (Result<(), Status>, bool) {
        let (Some(domain), Some(windows)) = (self.domains.get(&domain), &self.windows) else {
            return (Err(Status::NoEnt), true);
        };
        let (ids, counters) = (&domain.spaces, &mut self.counters);
        let (len, memory) = (windows.chunk_size(), MappedMemory::Chunk(chunk.index));
        for (place, &id) in ids.iter().enumerate() {
            let space = self.spaces.get_mut(id);
            let Err(status) = space.unmap(iova, len, memory, counters) else {
                continue;
            };
            let failed = ids[..place].iter().position(|&id| {
                let space = self.spaces.get_mut(id);
                space.map_chunk(iova, chunk, windows, counters).is_err()
            });
            if let Some(mapped_again) = failed {
                for &id in ids[..mapped_again].iter().chain(&ids[place..]) {
                    let space = self.spaces.get_mut(id);
                    space.discard(iova, len, memory, counters);
                }
            }
            return (Err(status), failed.is_none());
        }
        (Ok(()), false)
    }
}

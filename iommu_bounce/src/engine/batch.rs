// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! UNMAP requests that the driver sent together, with as few calls to the host as they need.
//!
//! Only UNMAPs are put together. MAPs that follow each other could share a call, but the driver may remove each of them alone
//! later, and neither VFIO nor IOMMUFD cuts a mapping: what one call has mapped must go in one piece.

use std::time::Instant;

use super::{Engine, unmap_run};
use crate::spec::{Status, TAIL_SIZE};
use crate::wire::{self, Kind, Request};

/// An UNMAP request, decoded but not served yet, and then its status.
#[derive(Clone, Copy, Debug)]
pub struct UnmapRequest {
    request: wire::Unmap,
    tag: u16,
    status: Status,
}

impl UnmapRequest {
    /// Decodes a request; `None` if it is not an UNMAP that can be served, which [`Engine::handle`] is for then. `room` is how
    /// many bytes the device-writable part has. `tag` is the caller's, to know the request again; tags go up in
    /// the order that the driver sent the requests in.
    pub fn decode(request: &[u8], room: usize, tag: u16) -> Option<Self> {
        let kind = Kind::of(request).filter(|kind| *kind == Kind::Unmap && room >= TAIL_SIZE)?;
        match wire::decode(kind, request)? {
            Request::Unmap(request) => Some(Self { request, tag, status: Status::DevErr }),
            _ => None,
        }
    }

    /// What [`decode`](Self::decode) was given.
    pub fn tag(&self) -> u16 {
        self.tag
    }

    /// What to write to the device-writable part.
    pub fn reply(&self) -> [u8; TAIL_SIZE] {
        wire::tail(self.status)
    }

    fn is_ok(&self) -> bool {
        self.status == Status::Ok
    }

    /// Whether `next` begins where this one ends, in the same domain.
    fn touches(&self, next: &Self) -> bool {
        self.request.domain == next.request.domain && self.request.last.checked_add(1) == Some(next.request.start)
    }

    /// Whether the ranges of this one and of `next`, which does not begin below it, have something in common.
    fn overlaps(&self, next: &Self) -> bool {
        self.request.domain == next.request.domain && self.request.last >= next.request.start
    }
}

impl Engine {
    /// Serves UNMAP requests, each with the outcome that it would have in its turn. Neighbours share calls to the host. The
    /// requests are in another order afterwards.
    ///
    /// Each counts as having taken the same part of the time.
    pub fn handle_unmaps(&mut self, requests: &mut [UnmapRequest]) {
        let began = Instant::now();
        self.retry_stuck();
        requests.sort_unstable_by_key(|unmap| (unmap.request.domain, unmap.request.start));
        if requests.is_sorted_by(|one, next| !one.overlaps(next)) {
            self.unmap_neighbours(requests);
        } else {
            // Which of them removes what they share depends on who comes first.
            requests.sort_unstable_by_key(|unmap| unmap.tag);
            self.unmap_each(requests);
        }
        let count = u32::try_from(requests.len()).unwrap_or(u32::MAX).max(1);
        let each = began.elapsed() / count;
        for unmap in requests {
            self.note(Kind::Unmap, &Request::Unmap(unmap.request), unmap.is_ok(), each);
        }
    }

    /// Serves requests that are in order and have nothing in common, so that none has an influence on another's outcome.
    fn unmap_neighbours(&mut self, requests: &mut [UnmapRequest]) {
        for neighbours in requests.chunk_by_mut(UnmapRequest::touches) {
            // Together they may remove a mapping that each alone would have cut.
            let together = neighbours.len() > 1
                && !self.maps_devices(neighbours)
                && neighbours.iter().all(|unmap| self.check_unmap(&unmap.request).is_ok());
            if together && self.unmap_together(neighbours).is_ok() {
                neighbours.iter_mut().for_each(|unmap| unmap.status = Status::Ok);
            } else {
                // After a failure of the host, each is told what is true of it.
                self.unmap_each(neighbours);
            }
        }
    }

    /// Whether a device's memory is mapped in the domain of requests, all of one. Who does that has no need for speed here.
    fn maps_devices(&self, requests: &[UnmapRequest]) -> bool {
        let domain = requests.first().and_then(|unmap| self.domains.get(&unmap.request.domain));
        domain.is_some_and(|domain| !domain.devices.is_empty())
    }

    fn unmap_each(&mut self, requests: &mut [UnmapRequest]) {
        for unmap in requests {
            unmap.status = self.unmap(unmap.request).err().unwrap_or(Status::Ok);
        }
    }

    /// Removes all mappings in the ranges of requests that follow each other without a gap and cut nothing.
    fn unmap_together(&mut self, neighbours: &[UnmapRequest]) -> Result<(), Status> {
        let [first, .., end] = neighbours else { return Err(Status::Inval) };
        let (start, last) = (first.request.start, end.request.last);
        let domain = self.domains.get_mut(&first.request.domain).ok_or(Status::NoEnt)?;
        while let Some(run) = domain.run(start, last) {
            unmap_run(&mut self.spaces, domain, run, &*self.ram, &mut self.counters)?;
            let begun_by = |iova| neighbours.partition_point(|unmap| unmap.request.start <= iova);
            let shared = begun_by(run.1) - begun_by(run.0);
            self.counters.merged_unmaps += (shared * domain.spaces.len()) as u64;
        }
        self.check_unstuck(first.request.domain, start, last)
    }
}

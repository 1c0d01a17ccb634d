// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! UNMAP requests that the driver sent together, served with as few host calls as possible.
//!
//! Only UNMAPs share host calls. MAPs of adjacent ranges could share a call too, but the driver may later unmap each range
//! separately. VFIO and IOMMUFD never split a mapping: a range that was mapped by one call must be unmapped completely.

use std::time::Instant;

use super::{Engine, unmap_run};
use crate::spec::{Status, TAIL_SIZE};
use crate::wire::{self, Kind, Request, WindowVersion};

/// Decoded UNMAP request, and its status after it was served.
#[derive(Clone, Copy, Debug)]
pub struct UnmapRequest {
    request: wire::Unmap,
    tag: u16,
    status: Status,
}

impl UnmapRequest {
    /// Decodes a request. Returns `None` if the request is not a valid UNMAP. In this case, the caller must pass the request to
    /// [`Engine::handle`]. `room` is the length of the device-writable part. `tag` identifies the request for the caller. A request that
    /// the driver sent later must have a larger tag.
    pub fn decode(request: &[u8], room: usize, tag: u16) -> Option<Self> {
        let kind = Kind::of(request).filter(|kind| *kind == Kind::Unmap && room >= TAIL_SIZE)?;
        // The layout of UNMAP is the same in all versions.
        match wire::decode(kind, request, WindowVersion::V3)? {
            Request::Unmap(request) => Some(Self { request, tag, status: Status::DevErr }),
            _ => None,
        }
    }

    /// Returns the tag that was passed to [`decode`](Self::decode).
    pub fn tag(&self) -> u16 {
        self.tag
    }

    /// Returns the bytes for the device-writable part.
    pub fn reply(&self) -> [u8; TAIL_SIZE] {
        wire::tail(self.status)
    }

    fn is_ok(&self) -> bool {
        self.status == Status::Ok
    }

    /// True if `next` starts where this request ends, in the same domain.
    fn touches(&self, next: &Self) -> bool {
        self.request.domain == next.request.domain && self.request.last.checked_add(1) == Some(next.request.start)
    }

    /// True if the ranges of this request and of `next` overlap. `next` must not start below the range of this request.
    fn overlaps(&self, next: &Self) -> bool {
        self.request.domain == next.request.domain && self.request.last >= next.request.start
    }
}

impl Engine {
    /// Serves UNMAP requests. Each request gets the same status as if the requests were served one by one. Adjacent requests share host
    /// calls. This call changes the order of `requests`.
    ///
    /// For the recorded latencies, the total duration is divided equally among the requests.
    pub fn handle_unmaps(&mut self, requests: &mut [UnmapRequest]) {
        let began = Instant::now();
        self.retry_stuck();
        requests.sort_unstable_by_key(|unmap| (unmap.request.domain, unmap.request.start));
        if requests.is_sorted_by(|one, next| !one.overlaps(next)) {
            self.unmap_neighbours(requests);
        } else {
            // If ranges overlap, the request that the driver sent first must remove the mapping. So serve the requests in the driver's
            // order.
            requests.sort_unstable_by_key(|unmap| unmap.tag);
            self.unmap_each(requests);
        }
        let count = u32::try_from(requests.len()).unwrap_or(u32::MAX).max(1);
        let took = began.elapsed();
        self.mark(began, took);
        let each = took / count;
        for unmap in requests {
            self.note(Kind::Unmap, &Request::Unmap(unmap.request), unmap.is_ok(), each);
        }
    }

    /// Serves requests in the order of their ranges. The ranges do not overlap, so no request affects the status of another.
    fn unmap_neighbours(&mut self, requests: &mut [UnmapRequest]) {
        for neighbours in requests.chunk_by_mut(UnmapRequest::touches) {
            // No single range may split a mapping, even if all ranges together cover the mapping completely.
            let together = neighbours.len() > 1
                && !self.maps_devices(neighbours)
                && neighbours.iter().all(|unmap| self.check_unmap(&unmap.request).is_ok());
            if together && self.unmap_together(neighbours).is_ok() {
                neighbours.iter_mut().for_each(|unmap| unmap.status = Status::Ok);
            } else {
                // Serve the requests one by one, so that each request gets its own status.
                self.unmap_each(neighbours);
            }
        }
    }

    /// True if the domain of these requests maps device memory. Such domains are rare, and their requests are served one at a
    /// time.
    fn maps_devices(&self, requests: &[UnmapRequest]) -> bool {
        let domain = requests.first().and_then(|unmap| self.domains.get(&unmap.request.domain));
        domain.is_some_and(|domain| !domain.devices.is_empty())
    }

    fn unmap_each(&mut self, requests: &mut [UnmapRequest]) {
        for unmap in requests {
            unmap.status = self.unmap(unmap.request).err().unwrap_or(Status::Ok);
        }
    }

    /// Removes all mappings in the ranges of these requests. The ranges are adjacent and split no mapping.
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

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! MAP_LIST: several ranges of guest memory, mapped at consecutive IOVAs by one request (docs/map-lists.md).
//!
//! Each range becomes a mapping of its own, as if the driver had sent a MAP for each range. So nothing else distinguishes these mappings
//! from others: an UNMAP can remove any of them, and a saved state contains each of them.

use super::Engine;
use super::device::unmap_devices;
use crate::DomainId;
use crate::mapping::MappedMemory;
use crate::spec::{MAX_MAP_RANGES, Status};
use crate::wire;

impl Engine {
    /// Maps all ranges for every endpoint of the domain, or none of the ranges. The status of a failed request is the status that a MAP of
    /// the first failed range would get.
    pub(super) fn map_list(&mut self, request: wire::MapList<'_>) -> Result<(), Status> {
        let wire::MapList { domain, start, flags, .. } = request;
        if !(1..=MAX_MAP_RANGES).contains(&request.len()) {
            return Err(Status::Inval);
        }
        let mut next = Some(start);
        for (gpa, len) in request.ranges() {
            let mapped = next.map_or(0, |next| next - start);
            // A list of short ranges may be long in total. Within a long range, `map` checks by itself.
            let outcome = if mapped > 0 && self.steps.are_for(mapped.saturating_add(len)) && self.steps.end_here() {
                Err(Status::DevErr)
            } else {
                // A range of 0 bytes, or IOVAs beyond the last address.
                let last = next.zip(len.checked_sub(1)).and_then(|(start, more)| start.checked_add(more));
                last.zip(next).ok_or(Status::Inval).and_then(|(last, start)| {
                    self.map(wire::Map { domain, start, last, gpa, flags })?;
                    Ok(last.checked_add(1))
                })
            };
            match outcome {
                Ok(end) => next = end,
                Err(status) => {
                    self.undo_maps(domain, start, next);
                    return Err(status);
                }
            }
        }
        Ok(())
    }

    /// Removes the mappings that a failed MAP_LIST has made, from `start` to before `end`. `None` as `end` means the end of all addresses.
    /// Ranges that the host fails to unmap become stuck.
    fn undo_maps(&mut self, domain: DomainId, start: u64, end: Option<u64>) {
        if end == Some(start) {
            return;
        }
        let last = end.map_or(u64::MAX, |end| end - 1);
        let Some(domain) = self.domains.get_mut(&domain) else { return };
        while let Some((from, to)) = domain.run(start, last) {
            for &space in &domain.spaces {
                self.spaces.get_mut(space).discard(from, to - from + 1, MappedMemory::Ram, &mut self.counters);
            }
            self.counters.mappings -= domain.forget(from, to);
        }
        unmap_devices(&mut self.spaces, domain, (start, last), &mut self.counters);
    }
}

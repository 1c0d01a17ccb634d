// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Domains, with their attached endpoints and their mappings.
//!
//! The mappings of a domain do not overlap. So a tree keyed by the first IOVA finds the mappings that touch a range in O(log n).

use std::collections::BTreeMap;

use crate::activity::Activity;
use crate::mapping::{Chunk, DeviceMapping, Mapping};
use crate::tree::MappingTree;
use crate::{EndpointId, SpaceId};

/// I/O address space of the guest. The domain exists as long as an endpoint is attached to it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Domain {
    /// True for a bypass domain. A bypass domain maps all RAM, and the driver cannot add or remove mappings.
    pub(crate) bypass: bool,
    pub(crate) endpoints: Vec<EndpointId>,
    /// Host address spaces of the endpoints. Each of these address spaces holds everything that the domain maps.
    pub(crate) spaces: Vec<SpaceId>,
    /// Mappings of guest RAM, by first IOVA.
    pub(crate) mappings: MappingTree,
    /// Bytes of mappings that count towards the cap on mapped bytes.
    pub(crate) mapped_bytes: u64,
    /// Counts and durations of the driver's requests for this domain.
    pub(crate) activity: Activity,
    /// Chunks of the window, by IOVA.
    pub(crate) chunks: BTreeMap<u64, Chunk>,
    /// Mappings of device memory, by first IOVA. These mappings overlap neither each other nor a mapping in `mappings`.
    pub(crate) devices: BTreeMap<u64, DeviceMapping>,
}

/// Mappings covered by an UNMAP range that splits no mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cover {
    /// No mapping.
    Nothing,
    /// One mapping that starts at the start of the range and ends at this IOVA. This is the most frequent case.
    One(u64),
    /// One or more mappings in any other arrangement.
    Several,
}

impl Domain {
    /// Adds a mapping. The range must be free.
    pub(crate) fn remember(&mut self, start: u64, mapping: Mapping) {
        self.mapped_bytes += mapping.last - start + 1;
        self.mappings.insert(start, mapping);
    }

    /// Adds a mapping of device memory. The range must be free.
    pub(crate) fn remember_device(&mut self, start: u64, mapping: DeviceMapping) {
        self.mapped_bytes += mapping.capped_bytes(start);
        self.devices.insert(start, mapping);
    }

    /// Removes the mapping of device memory that starts at this IOVA.
    pub(crate) fn forget_device(&mut self, start: u64) {
        if let Some(mapping) = self.devices.remove(&start) {
            self.mapped_bytes -= mapping.capped_bytes(start);
        }
    }

    /// Returns the number of mappings that the driver made.
    pub(crate) fn count(&self) -> u64 {
        if self.bypass { 0 } else { (self.mappings.len() + self.devices.len()) as u64 }
    }

    /// True if a mapping touches `[start, last]`.
    pub(crate) fn is_mapped(&self, start: u64, last: u64) -> bool {
        let mapped = self.mappings.floor(last).is_some_and(|(_, mapping)| mapping.last >= start);
        mapped || self.last_device(start, last).is_some()
    }

    /// Returns the last device mapping that touches `[start, last]`.
    pub(crate) fn last_device(&self, start: u64, last: u64) -> Option<(u64, DeviceMapping)> {
        let (iova, mapping) = self.devices.range(..=last).next_back()?;
        (mapping.last >= start).then_some((*iova, *mapping))
    }

    /// Returns the mappings covered by `[start, last]`, or `None` if the range splits a mapping.
    pub(crate) fn cover(&self, start: u64, last: u64) -> Option<Cover> {
        let cover = self.cover_ram(start, last)?;
        let Some((_, highest)) = self.last_device(start, last) else { return Some(cover) };
        let cut_below = self.devices.range(..start).next_back().is_some_and(|(_, mapping)| mapping.last >= start);
        (highest.last <= last && !cut_below).then_some(Cover::Several)
    }

    /// Like [`cover`](Self::cover), but only for mappings of guest RAM.
    fn cover_ram(&self, start: u64, last: u64) -> Option<Cover> {
        let Some((first, mapping)) = self.mappings.floor(last).filter(|(_, mapping)| mapping.last >= start) else {
            return Some(Cover::Nothing);
        };
        if mapping.last > last {
            return None;
        }
        if first == start {
            return Some(Cover::One(mapping.last));
        }
        let below = start.checked_sub(1).and_then(|below| self.mappings.floor(below));
        let cut = below.is_some_and(|(_, mapping)| mapping.last >= start);
        (!cut).then_some(Cover::Several)
    }

    /// Returns the first *run* of mappings that start in `[start, last]`: the first of these mappings, and all mappings that follow it
    /// without a gap. The result is the first and the last IOVA of the run.
    pub(crate) fn run(&self, start: u64, last: u64) -> Option<(u64, u64)> {
        let mut mappings = self.mappings.from(start).take_while(|(start, _)| *start <= last);
        let (first, mapping) = mappings.next()?;
        let mut end = mapping.last;
        for (next, mapping) in mappings {
            if end.checked_add(1) != Some(next) {
                break;
            }
            end = mapping.last;
        }
        Some((first, end))
    }

    /// Returns all [runs](Self::run), in the order of their IOVAs.
    pub(crate) fn runs(&self) -> impl Iterator<Item = (u64, u64)> {
        let mut next = Some(0);
        std::iter::from_fn(move || {
            let run = self.run(next?, u64::MAX)?;
            next = run.1.checked_add(1);
            Some(run)
        })
    }

    /// Removes the mappings in `[start, last]`. The range must not split a mapping. Returns the number of removed mappings.
    pub(crate) fn forget(&mut self, start: u64, last: u64) -> u64 {
        let (count, bytes) = self.mappings.remove_range(start, last);
        self.mapped_bytes -= bytes;
        count as u64
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Model of the device's behaviour. It is as simple as possible: it uses plain collections, and has no host.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use iommu_bounce::spec::{Status, feature};

use crate::ops::{Map, Op};
use crate::setup::{
    APERTURE, APERTURE_CHUNKS, BOUND, CHUNK, DEVICE_PAGES, FILE_PAGES, FIRST_IOVA, MAX_DOMAINS, MAX_MAPPINGS, PAGE,
    RAM_PAGES,
};

/// MMIO flag of MAP.
const MMIO: u32 = 4;
/// Flag of a dead mapping: the device memory has disappeared, and the host maps nothing there.
pub(crate) const DEAD: u32 = 1 << 31;

#[derive(Clone, Debug, Default)]
pub(crate) struct Domain {
    pub(crate) bypass: bool,
    /// First IOVA, last IOVA, guest-physical address and flags of each mapping.
    pub(crate) mappings: Vec<(u64, u64, u64, u32)>,
    /// IOVA and flags of each chunk.
    pub(crate) chunks: Vec<(u64, u32)>,
}

impl Domain {
    /// Returns the bytes of RAM and of the file that each address space of the domain maps.
    fn ram(&self) -> u64 {
        let counts =
            |(.., gpa, flags): &&(u64, u64, u64, u32)| flags & DEAD == 0 && !DEVICE_PAGES.contains(&(gpa / PAGE));
        let bytes = self.mappings.iter().filter(counts).map(|(start, last, ..)| last - start + 1).sum();
        if self.bypass { RAM_PAGES * PAGE } else { bytes }
    }
}

/// State of the host before an event, observed from outside of the engine.
#[derive(Clone, Debug, Default)]
pub(crate) struct Host {
    /// Mapped bytes of RAM and of the file, over all address spaces.
    pub(crate) mapped: u64,
    /// Endpoints that share an address space with others.
    pub(crate) sharing: BTreeSet<u32>,
}

#[derive(Clone, Debug)]
pub(crate) struct Model {
    pub(crate) features: u64,
    /// Existing endpoints.
    pub(crate) endpoints: BTreeSet<u32>,
    /// Domain of each attached endpoint.
    pub(crate) attached: BTreeMap<u32, u32>,
    pub(crate) domains: BTreeMap<u32, Domain>,
    /// True if unattached endpoints can access all RAM.
    pub(crate) bypass: bool,
    pub(crate) budget: u64,
    /// The cap on mapped bytes.
    pub(crate) max_mapped: Option<u64>,
    pub(crate) host: Host,
    /// True if the guest sees neither the device's registers nor the file.
    pub(crate) device_hidden: bool,
    /// Number of chunks that the store lost.
    pub(crate) lost: u64,
}

type Outcome = Result<(), Status>;

fn in_aperture(start: u64, last: u64) -> bool {
    (0..APERTURE_CHUNKS * CHUNK / PAGE)
        .map(|page| APERTURE + page * PAGE)
        .any(|page| start < page + PAGE && last >= page)
}

impl Model {
    pub(crate) fn chunks(&self) -> u64 {
        let chunks = self.domains.values().map(|domain| domain.chunks.len());
        chunks.sum::<usize>() as u64 + self.lost
    }

    pub(crate) fn mappings(&self) -> usize {
        let mappings = self.domains.values().map(|domain| domain.mappings.len());
        mappings.sum()
    }

    fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }

    /// Returns the statuses that the device must answer with on a host that does not fail. Returns an empty list for an event that is not a
    /// request.
    pub(crate) fn apply(&mut self, op: &Op) -> Vec<u8> {
        match op {
            Op::Unmaps(unmaps) => {
                let unmap =
                    |&(domain, start, pages): &(u32, u64, u64)| self.apply_one(&Op::Unmap { domain, start, pages });
                unmaps.iter().filter_map(unmap).collect()
            }
            op => self.apply_one(op).into_iter().collect(),
        }
    }

    fn apply_one(&mut self, op: &Op) -> Option<u8> {
        let outcome = match op {
            Op::Attach { endpoint, domain, bypass } => self.attach(*endpoint, *domain, *bypass),
            Op::Detach { endpoint, domain } => self.detach(*endpoint, *domain),
            Op::Map(map) => self.map(map),
            Op::MapList { .. } if !self.has(feature::MAP_LIST) => return None,
            Op::MapList { domain, start, flags, ranges } => self.map_list(*domain, *start, *flags, ranges),
            Op::Unmap { domain, start, pages } => {
                let start = FIRST_IOVA + start * PAGE;
                self.unmap(*domain, start, start + pages * PAGE - 1)
            }
            Op::Probe { endpoint } if !self.endpoints.contains(endpoint) => Err(Status::NoEnt),
            Op::Probe { .. } => Ok(()),
            // Without the feature, the device does not answer these requests.
            Op::WindowAdd { .. } | Op::WindowDel { .. } if !self.has(feature::BOUNCE_WINDOW) => return None,
            Op::WindowAdd { domain, page, flags } => self.add(*domain, FIRST_IOVA + page * PAGE, *flags),
            Op::WindowDel { domain, page } => self.del(*domain, FIRST_IOVA + page * PAGE),
            Op::Truncated { op, len } => {
                let whole = op.request()?.len();
                let unknown = match **op {
                    Op::WindowAdd { .. } | Op::WindowDel { .. } => !self.has(feature::BOUNCE_WINDOW),
                    Op::MapList { .. } => !self.has(feature::MAP_LIST),
                    _ => false,
                };
                if unknown || 1 + len.index(whole - 1) == whole {
                    return self.apply_one(op);
                }
                Err(Status::Inval)
            }
            Op::WriteBypass { value } => {
                if self.has(feature::BYPASS_CONFIG) && *value < 2 {
                    self.bypass = *value == 1;
                }
                return None;
            }
            Op::Reset { features } | Op::SystemReset { features } => {
                self.bypass &= matches!(op, Op::Reset { .. });
                self.attached.clear();
                self.domains.clear();
                self.features = *features;
                return None;
            }
            Op::Unmaps(_) => return None,
            Op::ShowDevice { shown } => {
                self.device_hidden = !shown;
                let mappings = self.domains.values_mut().flat_map(|domain| &mut domain.mappings);
                let of_devices = mappings.filter(|mapping| mapping.2 >= RAM_PAGES * PAGE);
                of_devices.for_each(|mapping| mapping.3 |= DEAD);
                return None;
            }
            Op::SetBudget { chunks } => {
                self.budget = chunks * CHUNK;
                return None;
            }
            Op::SetMaxMapped { pages } => {
                self.max_mapped = pages.map(|pages| pages * PAGE);
                return None;
            }
            Op::Plug { endpoint } => {
                self.endpoints.insert(*endpoint);
                return None;
            }
            Op::Unplug { endpoint } => {
                self.endpoints.remove(endpoint);
                self.attached.remove(endpoint);
                self.end_empty_domains();
                return None;
            }
        };
        Some(outcome.err().unwrap_or(Status::Ok) as u8)
    }

    fn end_empty_domains(&mut self) {
        let attached = &self.attached;
        self.domains.retain(|domain, _| attached.values().any(|of| of == domain));
    }

    fn attach(&mut self, endpoint: u32, domain: u32, bypass: bool) -> Outcome {
        if bypass && !self.has(feature::BYPASS_CONFIG) {
            return Err(Status::Inval);
        }
        if !self.endpoints.contains(&endpoint) {
            return Err(Status::NoEnt);
        }
        if !(1..=4).contains(&domain) {
            return Err(Status::Range);
        }
        if self.domains.get(&domain).is_some_and(|domain| domain.bypass != bypass) {
            return Err(Status::Inval);
        }
        let old = self.attached.get(&endpoint);
        if old == Some(&domain) {
            return Ok(());
        }
        let mut after = self.clone();
        after.attached.insert(endpoint, domain);
        after.domains.entry(domain).or_default().bypass = bypass;
        after.end_empty_domains();
        if after.domains.len() > MAX_DOMAINS {
            return Err(Status::NoMem);
        }
        let joins = endpoint != BOUND && self.address_spaces(domain).1;
        let needed = if joins { 0 } else { after.domains[&domain].ram() };
        let stays = self.host.sharing.contains(&endpoint);
        let goes = old.filter(|_| !stays).map_or(0, |old| self.domains[old].ram());
        self.check_mapped(needed.saturating_sub(goes))?;
        *self = after;
        Ok(())
    }

    /// Returns two flags: true if the domain contains the bound endpoint, and true if the domain contains movable endpoints. The movable
    /// endpoints share one address space.
    fn address_spaces(&self, domain: u32) -> (bool, bool) {
        let mut endpoints = self.attached.iter().filter(|(_, of)| **of == domain).map(|(endpoint, _)| *endpoint);
        (endpoints.clone().any(|endpoint| endpoint == BOUND), endpoints.any(|endpoint| endpoint != BOUND))
    }

    fn check_mapped(&self, more: u64) -> Outcome {
        let fits = self.max_mapped.is_none_or(|max| more == 0 || self.host.mapped + more <= max);
        if fits { Ok(()) } else { Err(Status::NoMem) }
    }

    /// True if the event would combine bypass mode with a cap. The model cannot predict the outcome, because the engine's order
    /// determines which endpoints can access RAM.
    pub(crate) fn is_undecided(&self, op: &Op) -> bool {
        match op {
            Op::WriteBypass { value } => *value == 1 && self.max_mapped.is_some(),
            Op::SetMaxMapped { pages } => pages.is_some() && self.bypass,
            _ => false,
        }
    }

    fn detach(&mut self, endpoint: u32, domain: u32) -> Outcome {
        if !self.endpoints.contains(&endpoint) {
            return Err(Status::NoEnt);
        }
        if self.attached.get(&endpoint) != Some(&domain) {
            return Err(Status::Inval);
        }
        self.attached.remove(&endpoint);
        self.end_empty_domains();
        Ok(())
    }

    fn map(&mut self, map: &Map) -> Outcome {
        let (start, last, gpa) = map.bytes();
        let touches_window = self.has(feature::BOUNCE_WINDOW) && in_aperture(start, last);
        let total = self.mappings();
        let (one, others) = self.address_spaces(map.domain);
        let spaces = u64::from(one) + u64::from(others);
        let capped = self.check_mapped(last.wrapping_sub(start).saturating_add(1).saturating_mul(spaces));
        if !self.has(feature::MAP_UNMAP) {
            return Err(Status::Unsupp);
        }
        let mmio = map.flags & MMIO != 0 && self.has(feature::MMIO);
        if !(1..=3).contains(&if mmio { map.flags & !MMIO } else { map.flags }) {
            return Err(Status::Inval);
        }
        if touches_window || start % PAGE != 0 || (last + 1) % PAGE != 0 || gpa % PAGE != 0 {
            return Err(Status::Range);
        }
        let domain = self.domains.get_mut(&map.domain).ok_or(Status::NoEnt)?;
        if domain.bypass {
            return Err(Status::Inval);
        }
        let overlaps = |(from, to, ..): &(u64, u64, u64, u32)| *from <= last && start <= *to;
        if domain.mappings.iter().any(overlaps) {
            return Err(Status::Inval);
        }
        if total >= MAX_MAPPINGS {
            return Err(Status::NoMem);
        }
        let end = map.gpa_page + map.pages;
        let is_in = |pages: &Range<u64>| map.gpa_page >= pages.start && end <= pages.end;
        if !is_in(&DEVICE_PAGES) || self.device_hidden {
            // For a MAP with the MMIO flag, the device checks the memory before the cap.
            let is_file = is_in(&FILE_PAGES) && !self.device_hidden;
            if mmio && !is_file {
                return Err(Status::Inval);
            }
            capped?;
            if !is_file && end > RAM_PAGES {
                return Err(Status::Inval);
            }
        }
        domain.mappings.push((start, last, gpa, map.flags));
        Ok(())
    }

    fn map_list(&mut self, domain: u32, start: u64, flags: u32, ranges: &[(u64, u64)]) -> Outcome {
        if ranges.is_empty() {
            return Err(Status::Inval);
        }
        let before = self.clone();
        let (mut start, mut outcome) = (start, Ok(()));
        let (one, others) = self.address_spaces(domain);
        let spaces = u64::from(one) + u64::from(others);
        for &(gpa_page, pages) in ranges {
            let map = Map { domain, start, pages, gpa_page, flags, skew: [0; 3] };
            outcome = if pages == 0 { Err(Status::Inval) } else { self.map(&map) };
            if outcome.is_err() {
                break;
            }
            if !DEVICE_PAGES.contains(&gpa_page) {
                self.host.mapped += pages * PAGE * spaces;
            }
            start += pages;
        }
        if outcome.is_err() {
            *self = before;
        }
        outcome
    }

    fn unmap(&mut self, domain: u32, start: u64, last: u64) -> Outcome {
        if !self.has(feature::MAP_UNMAP) {
            return Err(Status::Unsupp);
        }
        if self.has(feature::BOUNCE_WINDOW) && in_aperture(start, last) {
            return Err(Status::Range);
        }
        let domain = self.domains.get_mut(&domain).ok_or(Status::NoEnt)?;
        if domain.bypass {
            return Err(Status::Inval);
        }
        let touched = |m: &(u64, u64, u64, u32)| m.0 <= last && start <= m.1;
        let whole = |m: &(u64, u64, u64, u32)| start <= m.0 && m.1 <= last;
        if domain.mappings.iter().any(|m| touched(m) && !whole(m)) {
            return Err(Status::Range);
        }
        domain.mappings.retain(|m| !touched(m));
        Ok(())
    }

    fn check_chunk(&self, iova: u64) -> Outcome {
        let mut places = (0..APERTURE_CHUNKS).map(|n| APERTURE + n * CHUNK);
        if places.any(|place| place == iova) { Ok(()) } else { Err(Status::Range) }
    }

    fn add(&mut self, domain: u32, iova: u64, flags: u32) -> Outcome {
        if !(1..=3).contains(&flags) {
            return Err(Status::Inval);
        }
        self.check_chunk(iova)?;
        let full = (self.chunks() + 1) * CHUNK > self.budget;
        let domain = self.domains.get_mut(&domain).ok_or(Status::NoEnt)?;
        if domain.bypass || domain.chunks.iter().any(|(place, _)| *place == iova) {
            return Err(Status::Inval);
        }
        if full {
            return Err(Status::NoMem);
        }
        domain.chunks.push((iova, flags));
        Ok(())
    }

    fn del(&mut self, domain: u32, iova: u64) -> Outcome {
        self.check_chunk(iova)?;
        let domain = self.domains.get_mut(&domain).ok_or(Status::NoEnt)?;
        let place = domain.chunks.iter().position(|(place, _)| *place == iova);
        domain.chunks.remove(place.ok_or(Status::NoEnt)?);
        Ok(())
    }
}

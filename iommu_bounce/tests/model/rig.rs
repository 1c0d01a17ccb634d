// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The engine on a test host, together with the model.

use std::collections::BTreeMap;
use std::sync::Arc;

use iommu_bounce::test_utils::{ChunkProbe, MapperProbe, RecordingMapper, TestChunks, TestGroup, TestRam};
use iommu_bounce::{Counters, DmaMapper, Engine, EngineConfig, Limits, Permissions, UnmapRequest, WindowConfig};

use crate::model::{DEAD, Domain, Host, Model};
use crate::ops::{HostFailure, Op};
use crate::setup::{
    APERTURE, APERTURE_CHUNKS, BOUND, CHUNK, DEVICE_PAGES, ENDPOINTS, FILE_PAGES, MAX_DOMAINS, MAX_MAPPINGS, PAGE,
    RAM_PAGES,
};

const FIRST_REGION: usize = 0x1_4000;
const SECOND_REGION: usize = 0x1_4000;
const REGION_CHUNKS: u32 = 5;
const FIRST_BUDGET: u64 = 3 * CHUNK;

pub(crate) struct Rig {
    pub(crate) engine: Engine,
    pub(crate) model: Model,
    ram: Arc<TestRam>,
    /// Newest mapper of each endpoint.
    mappers: BTreeMap<u32, MapperProbe>,
    /// Mappers of endpoints that were removed. Another endpoint may still use the address space of such a mapper.
    earlier: Vec<MapperProbe>,
    group: TestGroup,
    chunks: ChunkProbe,
}

impl Rig {
    pub(crate) fn new() -> Self {
        let ram = TestRam::new(&[(0, FIRST_REGION), (FIRST_REGION as u64, SECOND_REGION)]);
        let ram = ram.with_device(DEVICE_PAGES.start * PAGE, 0x4000, false);
        let ram = ram.with_file(FILE_PAGES.start * PAGE, 0x4000);
        let ram = Arc::new(ram);
        let store = TestChunks::new(CHUNK, REGION_CHUNKS);
        let chunks = store.probe();
        let config = EngineConfig {
            domain_range: 1..=4,
            limits: Limits { max_mappings: MAX_MAPPINGS, max_domains: MAX_DOMAINS, ..Limits::default() },
            window: Some(WindowConfig {
                aperture: APERTURE..=APERTURE + APERTURE_CHUNKS * CHUNK - 1,
                budget: FIRST_BUDGET,
                threshold: 0,
                threshold_write: 0,
            }),
            ..EngineConfig::default()
        };
        let engine = Engine::new(config, ram.clone(), Some(Box::new(store)));
        let engine = engine.expect("the configuration is valid");
        let model = Model {
            features: u64::MAX,
            endpoints: ENDPOINTS.collect(),
            attached: BTreeMap::new(),
            domains: BTreeMap::new(),
            bypass: false,
            budget: FIRST_BUDGET,
            max_mapped: None,
            host: Host::default(),
            device_hidden: false,
            lost: 0,
        };
        let (mappers, group) = (BTreeMap::new(), TestGroup::default());
        let mut rig = Self { engine, model, ram, mappers, earlier: Vec::new(), group, chunks };
        ENDPOINTS.for_each(|id| rig.plug(id));
        rig.engine.accept_features(u64::MAX);
        rig
    }

    fn plug(&mut self, id: u32) {
        let there = self.engine.report().endpoints.iter().any(|endpoint| endpoint.endpoint == id);
        if there {
            return;
        }
        let mut mapper = RecordingMapper::new();
        if id != BOUND {
            mapper = self.group.mapper(id, mapper.limits());
        }
        let mapper = mapper.with_page_tables();
        self.chunks.watch(mapper.probe());
        self.earlier.extend(self.mappers.insert(id, mapper.probe()));
        match self.engine.add_endpoint(id, Box::new(mapper)) {
            Ok(()) => {}
            // The host did not map RAM for the endpoint, or the cap forbids the mapping.
            Err(error) => {
                let capped = self.engine.max_mapped_bytes().is_some();
                assert!(self.model.bypass || capped || self.host_failures() > 0, "{error}");
            }
        }
    }

    fn unplug(&mut self, id: u32) {
        // Drop the returned mapper, so that its remaining mappings are removed.
        drop(self.engine.remove_endpoint(id));
    }

    fn all_mappers(&self) -> impl Iterator<Item = &MapperProbe> {
        self.mappers.values().chain(&self.earlier)
    }

    /// Sends one or more requests and returns their statuses, or performs another event.
    pub(crate) fn perform(&mut self, op: &Op) -> Vec<u8> {
        match op {
            Op::Unmaps(unmaps) => return self.unmap_together(unmaps),
            Op::Reset { features } => {
                self.engine.reset();
                self.engine.accept_features(*features);
            }
            Op::SystemReset { features } => {
                self.engine.system_reset();
                self.engine.reset();
                self.engine.accept_features(*features);
            }
            Op::WriteBypass { value } => self.engine.write_bypass(*value),
            Op::ShowDevice { shown } => {
                self.ram.show_device(*shown);
                let gone = self.engine.revoke_device_memory(DEVICE_PAGES.start * PAGE, 8 * PAGE);
                if !gone {
                    assert_ne!(self.engine.counters().stuck_ranges, 0);
                }
            }
            Op::SetBudget { chunks } => {
                let set = self.engine.set_budget(chunks * CHUNK);
                set.expect("the region is as large");
            }
            Op::SetMaxMapped { pages } => {
                let set = self.engine.set_max_mapped_bytes(pages.map(|pages| pages * PAGE));
                set.expect("it is not 0");
            }
            Op::Plug { endpoint } => self.plug(*endpoint),
            Op::Unplug { endpoint } => self.unplug(*endpoint),
            _ => {}
        }
        self.send(op).into_iter().collect()
    }

    fn unmap_together(&mut self, unmaps: &[(u32, u64, u64)]) -> Vec<u8> {
        let decode = |(tag, &(domain, start, pages))| {
            let request = Op::Unmap { domain, start, pages }.request()?;
            UnmapRequest::decode(&request, 4, tag)
        };
        let mut requests: Vec<_> = (0..).zip(unmaps).filter_map(decode).collect();
        self.engine.handle_unmaps(&mut requests);
        requests.sort_by_key(UnmapRequest::tag);
        requests.iter().map(|unmap| unmap.reply()[0]).collect()
    }

    fn send(&mut self, op: &Op) -> Option<u8> {
        let request = op.request()?;
        let mut reply = [0x5a; 516];
        let used = self.engine.handle(&request, &mut reply);
        if used == 0 && matches!(request[0], 0x40..=0x42) {
            return None;
        }
        let expected = match request[0] {
            5 => 516,
            0x40 => 12,
            _ => 4,
        };
        assert_eq!(used, expected, "{op:?}");
        let status = reply[used - 4];
        if request[0] == 0x40 {
            let offset = u64::from_le_bytes(*reply.first_chunk().expect("it is long enough"));
            let place = offset / CHUNK < REGION_CHUNKS.into() && offset % CHUNK == 0;
            assert_eq!(place, status == 0, "{op:?}: {offset:#x}");
            assert!(place || offset == u64::MAX);
        }
        Some(status)
    }

    pub(crate) fn inject(&self, failure: &HostFailure) {
        match *failure {
            HostFailure::Map { endpoint, after } => self.mappers[&endpoint].fail_map(after),
            HostFailure::Exhausted { endpoint, after } => {
                self.mappers[&endpoint].exhaust_map(after);
            }
            HostFailure::Unmap { endpoint, after } => self.mappers[&endpoint].fail_unmap(after),
            HostFailure::AllUnmaps { endpoint } => self.mappers[&endpoint].refuse_unmaps(true),
            HostFailure::Adopt { after } => self.group.fail_adopt(after),
            HostFailure::Back => self.chunks.fail_back(),
            HostFailure::BackExhausted => self.chunks.exhaust_back(),
            HostFailure::Release => self.chunks.fail_release(),
            HostFailure::Healed => self.heal(),
        }
    }

    /// Returns the mapper that translates for the endpoint.
    fn mapper_of(&self, id: u32) -> MapperProbe {
        if id == BOUND { self.mappers[&id].clone() } else { self.group.mapper_of(id) }
    }

    pub(crate) fn heal(&self) {
        self.group.heal();
        self.all_mappers().for_each(MapperProbe::heal);
        self.chunks.heal();
    }

    /// Returns the number of host failures so far.
    pub(crate) fn host_failures(&self) -> u64 {
        let mappers = self.all_mappers().map(MapperProbe::failures);
        mappers.sum::<u64>() + self.chunks.failures() + self.group.failures()
    }

    /// Checks that the host holds the state of the model, and nothing else.
    pub(crate) fn check_state(&self) {
        for &id in &self.model.endpoints {
            let mapper = self.mapper_of(id);
            let domain = self.model.attached.get(&id);
            let domain = domain.map(|domain| self.model.domains[domain].clone());
            let mut domain = domain.unwrap_or_else(|| Domain { bypass: self.model.bypass, ..Domain::default() });
            if domain.bypass {
                domain.mappings.push((0, RAM_PAGES * PAGE - 1, 0, 3));
            }
            let mut bytes = 0;
            for &(start, last, gpa, flags) in &domain.mappings {
                if flags & DEAD != 0 {
                    assert_eq!(mapper.translate(start), None, "endpoint {id} can access memory that it must not");
                    continue;
                }
                bytes += last - start + 1;
                for offset in (0..last - start).step_by(0x1000) {
                    let expected = self.ram.host_address(gpa + offset);
                    let expected = (expected, Permissions::from_bits_truncate(flags & 3));
                    let found = mapper.translate(start + offset);
                    assert_eq!(found, Some(expected), "endpoint {id}, {start:#x}");
                }
            }
            let mappings = mapper.mappings();
            for (iova, flags) in &domain.chunks {
                bytes += CHUNK;
                let mapping = mappings[iova];
                assert_eq!((mapping.len, mapping.permissions.bits()), (CHUNK, *flags));
            }
            let parked = mappings.iter().filter(|(iova, mapping)| {
                self.is_chunk(mapping.host_address) && !domain.chunks.iter().any(|(place, _)| place == *iova)
            });
            bytes += parked.count() as u64 * CHUNK;
            assert_eq!(mapper.mapped_bytes(), bytes, "endpoint {id}");
        }
        self.check_chunks();
        let counters = self.engine.counters();
        assert_eq!(counters.mappings, self.model.mappings() as u64);
        assert_eq!(counters.parked_chunks, self.parked_on_host());
        let chunks = self.model.chunks() + counters.parked_chunks;
        assert_eq!(counters.window_bytes, chunks * CHUNK);
        assert_eq!((counters.stuck_ranges, counters.lost_chunks), (0, self.model.lost));
        self.check_counters();
    }

    /// Returns the number of chunks that the host maps but no domain has.
    fn parked_on_host(&self) -> u64 {
        let mut domains = Vec::new();
        let mut mapped = 0;
        for mapper in self.all_mappers() {
            mapped += mapper.mappings().values().filter(|mapping| self.is_chunk(mapping.host_address)).count();
        }
        for (id, domain) in &self.model.attached {
            let place = (self.mapper_of(*id), *domain);
            if !domains.iter().any(|(mapper, _): &(MapperProbe, u32)| mapper.is(&place.0)) {
                domains.push(place);
            }
        }
        let owned = domains.iter().map(|(_, domain)| self.model.domains[domain].chunks.len());
        assert_eq!(self.engine.counters().parked_chunks, u64::from(self.chunks.parked()));
        (mapped - owned.sum::<usize>()) as u64
    }

    /// Checks that a chunk is in one domain, at one IOVA, for all endpoints of the domain.
    fn check_chunks(&self) {
        let mut owners = BTreeMap::new();
        for (id, domain) in &self.model.attached {
            for (iova, _) in &self.model.domains[domain].chunks {
                let address = self.mapper_of(*id).translate(*iova).expect("it is mapped").0;
                let owner = *owners.entry(address).or_insert((*domain, *iova));
                assert_eq!(owner, (*domain, *iova));
            }
        }
    }

    /// True if this host address, which is mapped, belongs to a chunk.
    fn is_chunk(&self, address: usize) -> bool {
        let device = self.ram.host_address(DEVICE_PAGES.start * PAGE);
        !self.is_capped(address) && !(device..device + 0x4000).contains(&address)
    }

    /// True if guest RAM or the file is at this host address.
    fn is_capped(&self, address: usize) -> bool {
        let regions = [(0, FIRST_REGION), (FIRST_REGION as u64, SECOND_REGION), (FILE_PAGES.start * PAGE, 0x4000)];
        regions.iter().any(|&(gpa, len)| {
            let start = self.ram.host_address(gpa);
            (start..start + len).contains(&address)
        })
    }

    /// Returns the bytes that the host maps at addresses for which `of` is true, over all address spaces.
    fn mapped(&self, of: impl Fn(usize) -> bool) -> u64 {
        let mappings = self.all_mappers().flat_map(|mapper| mapper.mappings().into_values());
        mappings.filter(|mapping| of(mapping.host_address)).map(|mapping| mapping.len).sum()
    }

    /// Returns the current state of the host.
    pub(crate) fn look(&self) -> Host {
        let endpoints = &self.model.endpoints;
        let shares = |id: &u32| {
            let own = self.mapper_of(*id);
            endpoints.iter().any(|other| other != id && self.mapper_of(*other).is(&own))
        };
        let sharing = endpoints.iter().copied().filter(shares).collect();
        Host { mapped: self.mapped(|address| self.is_capped(address)), sharing }
    }

    /// Checks that the engine's counters match the host.
    pub(crate) fn check_counters(&self) {
        let counters = self.engine.counters();
        assert_eq!(counters.mapped_bytes, self.mapped(|address| self.is_capped(address)));
        let chunks = self.mapped(|address| self.is_chunk(address));
        assert_eq!(counters.pinned_bytes, counters.mapped_bytes + chunks);
        assert!(counters.peak_pinned_bytes >= counters.pinned_bytes);
        assert_eq!(counters.window_bytes, u64::from(self.chunks.backed()) * CHUNK);
        assert!(counters.peak_mapped_bytes >= counters.mapped_bytes);
    }

    /// Checks that window memory has not grown beyond the budget, and mapped memory has not grown beyond the cap.
    pub(crate) fn check_budget(&self, before: &Counters) {
        let (now, mapped) = (self.engine.counters().window_bytes, self.engine.counters().mapped_bytes);
        let max = self.engine.max_mapped_bytes().unwrap_or(u64::MAX);
        assert!(mapped <= before.mapped_bytes || mapped <= max, "{mapped:#x} over {max:#x}");
        let before = before.window_bytes;
        let space = self.engine.config_space();
        let budget = u64::from_le_bytes(*space[64..].first_chunk().expect("it is there"));
        assert!(now <= before || now <= budget, "{now:#x} over {budget:#x}");
    }

    /// Resets the VM, which ends bypass. Then resets the device as a driver without windows, which releases the parked chunks.
    pub(crate) fn end(&mut self) {
        self.engine.system_reset();
        self.engine.accept_features(0);
        self.engine.reset();
    }

    /// Checks the host after a reset. Nothing may be mapped, and only lost chunks may be backed.
    pub(crate) fn check_empty(&self) {
        assert!(self.all_mappers().all(MapperProbe::is_empty));
        let counters = self.engine.counters();
        assert_eq!(u64::from(self.chunks.backed()), counters.lost_chunks);
        assert_eq!((counters.mappings, counters.mapped_bytes), (0, 0));
        assert_eq!(counters.stuck_ranges, 0);
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Test in which two devices do DMA to a few IOVAs while their address spaces change. The test attaches, detaches and removes endpoints,
//! adds and removes mappings, and resets the engine. A model predicts the memory that each device may access. `CAROM_ORACLE_STEPS` sets the
//! number of steps, and `CAROM_ORACLE_SEED` the random seed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::{array, env};

use iommu_bounce::test_utils::{self, TestRam};
use iommu_bounce::{Engine, EngineConfig, GuestRam};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};

use crate::hardware::*;

const STEPS: usize = 25;

/// Number of RAM pages. Mappings use the first [`MAPPED_PAGES`] pages. No device may ever access the other pages.
const PAGES: u8 = 12;
const MAPPED_PAGES: u8 = 8;
const PLACES: u8 = 4;
/// Number of bytes of a page that one transfer copies.
const COPIED: u64 = 2048;
/// Bytes that a device may have in its buffer after a failed read.
const NOTHING: [u8; 2] = [0, 0xff];

#[derive(Clone, Debug)]
enum Step {
    Attach(usize, u32),
    Detach(usize),
    Map {
        domain: u32,
        place: u8,
        page: u8,
        permissions: u32,
    },
    Unmap(u32, u8),
    UnmapAll(u32),
    Reset,
    /// Closes the device and opens it again.
    Unplug(usize),
}

/// Transfer that both devices make at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transfer {
    /// From an IOVA into the device.
    Load,
    /// From the device to an IOVA.
    Store,
}

fn step() -> impl Strategy<Value = Step> {
    let (endpoint, domain) = (0..2usize, 1..=2u32);
    let map = (domain.clone(), 0..PLACES, 0..MAPPED_PAGES, 1..=3u32)
        .prop_map(|(domain, place, page, permissions)| Step::Map { domain, place, page, permissions });
    prop_oneof![
        4 => (endpoint.clone(), domain.clone()).prop_map(|(endpoint, domain)| Step::Attach(endpoint, domain)),
        2 => endpoint.clone().prop_map(Step::Detach),
        8 => map,
        3 => (domain.clone(), 0..PLACES).prop_map(|(domain, place)| Step::Unmap(domain, place)),
        1 => domain.prop_map(Step::UnmapAll),
        1 => Just(Step::Reset),
        1 => endpoint.prop_map(Step::Unplug),
    ]
}

fn transfers() -> impl Strategy<Value = [(Transfer, [u8; 2]); 2]> {
    let places = || [0..PLACES, 0..PLACES];
    let at_hand = prop::sample::select(vec![Transfer::Load, Transfer::Store]);
    (at_hand, places(), places()).prop_map(|(at_hand, first, second)| {
        let then = if at_hand == Transfer::Load { Transfer::Store } else { Transfer::Load };
        [(at_hand, first), (then, second)]
    })
}

/// Page and permissions of the mapping at each place.
type Mappings = BTreeMap<u8, (u8, u32)>;

/// Pages that a transfer may have accessed. The set contains `None` if the transfer may have accessed no page.
type Reached = BTreeSet<Option<u8>>;

/// Model of the memory that each device may access.
#[derive(Clone, Debug, Default)]
struct Model {
    domains: BTreeMap<u32, Mappings>,
    of: [Option<u32>; 2],
}

impl Model {
    fn leave(&mut self, endpoint: usize) {
        if let Some(domain) = self.of[endpoint].take()
            && !self.of.contains(&Some(domain))
        {
            self.domains.remove(&domain);
        }
    }

    /// Returns the pages that an endpoint may access at a place. The endpoint may also read a write-only mapping, because not every IOMMU
    /// supports write-only mappings (virtio 1.3, section 5.13.6.5.2).
    fn reached(&self, endpoint: usize, place: u8, transfer: Transfer) -> Reached {
        let mapped = self.of[endpoint].and_then(|domain| self.domains[&domain].get(&place));
        match (mapped, transfer) {
            (Some((page, 1 | 3)), Transfer::Load) | (Some((page, 2 | 3)), Transfer::Store) => [Some(*page)].into(),
            (Some((page, 2)), Transfer::Load) => [Some(*page), None].into(),
            _ => [None].into(),
        }
    }
}

struct Oracle {
    edus: [Option<Edu>; 2],
    engine: Engine,
    ram: Arc<TestRam>,
    model: Model,
    /// Bytes that each device may have in its buffer.
    buffers: [BTreeSet<u8>; 2],
    /// Number of page changes that the test has found.
    writes: u32,
}

fn iova(place: u8) -> u32 {
    (u32::from(place) + 1) << 20
}

fn endpoint_id(endpoint: usize) -> u32 {
    u32::try_from(endpoint).unwrap() + 1
}

impl Oracle {
    fn open() -> Self {
        let host = host();
        let edus = ["CAROM_EDU", "CAROM_EDU2"].map(|variable| Edu::open_by(&host, variable));
        let ram = Arc::new(TestRam::new(&[(0, usize::from(PAGES) * 4096)]));
        let config = EngineConfig { input_range: 0..=0xffff_ffff, ..Default::default() };
        let mut engine = Engine::new(config, ram.clone(), None).unwrap();
        for (endpoint, edu) in edus.iter().enumerate() {
            let id = endpoint_id(endpoint);
            engine.add_endpoint(id, Box::new(edu.0.mapper(id, ram.clone()))).unwrap();
        }
        engine.accept_features(engine.features());
        // The buffers' contents from before the test are unknown.
        let buffers = array::from_fn(|_| (0..=u8::MAX).collect());
        Self { edus: edus.map(Some), engine, ram, model: Model::default(), buffers, writes: 0 }
    }

    fn edu(&self, endpoint: usize) -> &Edu {
        self.edus[endpoint].as_ref().unwrap()
    }

    fn request(&mut self, request: &[u8]) {
        let mut reply = [0xff; 4];
        assert_eq!(self.engine.handle(request, &mut reply), 4);
        assert_eq!(reply[0], 0, "{request:x?}");
    }

    /// Performs `step` if the step is possible, and updates the model.
    fn act(&mut self, step: &Step) {
        match *step {
            Step::Attach(endpoint, domain) => {
                self.request(&test_utils::attach(endpoint_id(endpoint), domain));
                if self.model.of[endpoint] != Some(domain) {
                    self.model.leave(endpoint);
                    self.model.of[endpoint] = Some(domain);
                    self.model.domains.entry(domain).or_default();
                }
            }
            Step::Detach(endpoint) => {
                if let Some(domain) = self.model.of[endpoint] {
                    self.request(&test_utils::detach(endpoint_id(endpoint), domain));
                    self.model.leave(endpoint);
                }
            }
            Step::Map { domain, place, page, permissions } => {
                if let Some(mappings) = self.model.domains.get_mut(&domain)
                    && !mappings.contains_key(&place)
                {
                    mappings.insert(place, (page, permissions));
                    let (start, gpa) = (u64::from(iova(place)), u64::from(page) * PAGE);
                    self.request(&test_utils::map(domain, start, start + PAGE - 1, gpa, permissions));
                }
            }
            Step::Unmap(domain, place) => {
                if let Some(mappings) = self.model.domains.get_mut(&domain) {
                    mappings.remove(&place);
                    let start = u64::from(iova(place));
                    self.request(&test_utils::unmap(domain, start, start + PAGE - 1));
                }
            }
            Step::UnmapAll(domain) => {
                if let Some(mappings) = self.model.domains.get_mut(&domain) {
                    mappings.clear();
                    self.request(&test_utils::unmap(domain, 0, 0xffff_ffff));
                }
            }
            Step::Reset => {
                self.engine.reset();
                self.engine.accept_features(self.engine.features());
                self.model = Model::default();
            }
            Step::Unplug(endpoint) => {
                let id = endpoint_id(endpoint);
                drop(self.engine.remove_endpoint(id).unwrap());
                self.model.leave(endpoint);
                let host = self.edu(endpoint).0.host.clone();
                self.edus[endpoint] = None;
                let edu = Edu::open_by(&host, ["CAROM_EDU", "CAROM_EDU2"][endpoint]);
                self.engine.add_endpoint(id, Box::new(edu.0.mapper(id, self.ram.clone()))).unwrap();
                self.edus[endpoint] = Some(edu);
            }
        }
    }

    /// Fills page n with the byte n + 1.
    fn fill(&self) {
        for page in 0..PAGES {
            self.ram.slice(u64::from(page) * PAGE, PAGE).unwrap().copy_from(&[page + 1; 4096]);
        }
    }

    /// Starts a copy on both devices, and performs `step` during the copies. Then updates the expected buffers, or checks the stored bytes.
    fn transfer(&mut self, transfer: Transfer, places: [u8; 2], step: Option<&Step>) {
        self.fill();
        for (endpoint, place) in places.into_iter().enumerate() {
            self.edu(endpoint).begin_copy(iova(place), transfer == Transfer::Load, u32::try_from(COPIED).unwrap());
        }
        let before = self.model.clone();
        if let Some(step) = step {
            self.act(step);
        }
        for endpoint in 0..2 {
            self.edu(endpoint).wait();
        }
        // The transfer may have happened before the step or after the step.
        let reached = array::from_fn(|endpoint| {
            let models = [&before, &self.model];
            models.into_iter().flat_map(|model| model.reached(endpoint, places[endpoint], transfer)).collect()
        });
        match transfer {
            Transfer::Load => self.loaded(&reached),
            Transfer::Store => self.check_stored(&reached),
        }
    }

    fn loaded(&mut self, reached: &[Reached; 2]) {
        for (buffer, reached) in self.buffers.iter_mut().zip(reached) {
            let had = std::mem::take(buffer);
            buffer.extend(reached.iter().flatten().map(|page| page + 1));
            if reached.contains(&None) {
                buffer.extend(had.into_iter().chain(NOTHING));
            }
        }
    }

    fn check_stored(&mut self, reached: &[Reached; 2]) {
        for page in 0..PAGES {
            let mut data = [0; 4096];
            self.ram.slice(u64::from(page) * PAGE, PAGE).unwrap().copy_to(&mut data);
            let (own, first) = (page + 1, data[0]);
            assert!(data[..2048].iter().all(|byte| *byte == first), "page {page} is written in part");
            assert!(data[2048..].iter().all(|byte| *byte == own), "page {page} is written after the copied bytes");
            let writers: Vec<usize> = (0..2).filter(|endpoint| reached[*endpoint].contains(&Some(page))).collect();
            let is_known = |endpoint: &usize| self.buffers[*endpoint].contains(&first);
            assert!(first == own || writers.iter().any(is_known), "page {page} holds {first} by {writers:?}: {self:?}");
            self.writes += u32::from(first != own);
            // True for a device that has certainly written the page, whether its transfer happened before or after the step.
            let is_sure = |endpoint: &usize| reached[*endpoint].len() == 1;
            let surely = writers.iter().any(is_sure);
            assert!(!surely || first != own || writers.iter().any(is_known), "page {page} was not written: {self:?}");
            if let [only] = writers[..]
                && is_sure(&only)
            {
                self.buffers[only] = BTreeSet::from([first]);
            }
        }
    }
}

impl std::fmt::Debug for Oracle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Oracle").field("model", &self.model).field("buffers", &self.buffers).finish_non_exhaustive()
    }
}

fn variable(name: &str, otherwise: usize) -> usize {
    env::var(name).map_or(otherwise, |text| text.parse().expect("a number"))
}

#[test]
fn devices_reach_exactly_their_mappings_under_random_steps() {
    let seed = variable("CAROM_ORACLE_SEED", 1) as u64;
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &[seed.to_le_bytes(); 4].concat());
    let mut runner = TestRunner::new_with_rng(ProptestConfig::default(), rng);
    let strategy = (step(), transfers());
    let mut oracle = Oracle::open();
    for number in 0..variable("CAROM_ORACLE_STEPS", STEPS) {
        let (step, transfers) = strategy.new_tree(&mut runner).unwrap().current();
        eprintln!("{number}: {step:?} {transfers:?}");
        for ((transfer, places), step) in transfers.into_iter().zip([Some(&step), None]) {
            oracle.transfer(transfer, places, step);
        }
    }
    let counters = oracle.engine.counters();
    assert_eq!((counters.stuck_ranges, counters.host_errors), (0, 0));
    assert!(oracle.writes > 0, "no transfer ever changed a page");
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the engine against the rules of the specification, one module for each subject.

mod attach;
mod batch;
mod bypass;
mod device;
mod failure;
mod faults;
mod format;
mod interrupt;
mod map_list;
mod map_unmap;
mod mapped;
mod parking;
mod report;
mod setup;
mod shared;
mod state;
mod table_pages;
mod unmap_time;
mod window;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::spec::{Status, feature};
use crate::test_utils::{ChunkProbe, MapperProbe, RecordingMapper, TestChunks, TestRam};
use crate::{EndpointId, Engine, EngineConfig, MAX_REPLY, UnmapRequest, WindowConfig};

const PAGE: u64 = 0x1000;
const CHUNK: u64 = 0x1_0000;
const APERTURE: u64 = 0xe000_0000;
/// Aperture above 4 GiB, and above RAM.
const HIGH: u64 = 0x2_0000_0000;
const APERTURE_CHUNKS: u64 = 16;
const BUDGET_CHUNKS: u64 = 4;
const REGION_CHUNKS: u32 = 8;

const READ: u32 = 1;
const WRITE: u32 = 2;
const BOTH: u32 = 3;

/// Start of the second RAM region. The region directly follows the first region in guest-physical memory, but not in host memory.
const SECOND_REGION: u64 = 0x40_0000;
const RAM_END: u64 = 0x50_0000;

/// Engine with bounce windows and three endpoints, 1 to 3, and handles of its test host.
struct Rig {
    engine: Engine,
    ram: Arc<TestRam>,
    mappers: BTreeMap<EndpointId, MapperProbe>,
    chunks: ChunkProbe,
}

fn window_config() -> WindowConfig {
    WindowConfig {
        aperture: APERTURE..=APERTURE + APERTURE_CHUNKS * CHUNK - 1,
        budget: BUDGET_CHUNKS * CHUNK,
        threshold: 0x4000,
        threshold_write: 0x2000,
    }
}

fn engine_config() -> EngineConfig {
    EngineConfig { window: Some(window_config()), domain_range: 1..=100, ..EngineConfig::default() }
}

fn ram() -> TestRam {
    let first = usize::try_from(SECOND_REGION).expect("it is small");
    TestRam::new(&[(0, first), (SECOND_REGION, 0x10_0000), (1 << 32, 0x10_0000)])
}

impl Rig {
    /// Creates a rig with all features accepted.
    fn new() -> Self {
        Self::with_config(engine_config())
    }

    /// Creates a rig with endpoint 1 in domain 1.
    fn attached() -> Self {
        let mut rig = Self::new();
        rig.all_ok([crate::test_utils::attach(1, 1)]);
        rig
    }

    /// Creates a rig whose driver did not accept bounce windows.
    fn standard() -> Self {
        Self::without(feature::ANY_BOUNCE_WINDOW)
    }

    /// Creates a rig whose driver did not accept `features`.
    fn without(features: u64) -> Self {
        let mut rig = Self::new();
        rig.engine.accept_features(rig.engine.features() & !features);
        rig
    }

    fn with_config(config: EngineConfig) -> Self {
        Self::with_ram(config, ram())
    }

    /// Creates a rig for endpoints whose RAM the host kernel pins.
    fn pinning(config: EngineConfig) -> Self {
        Self::with_mappers(config, ram(), || RecordingMapper::new().with_page_tables())
    }

    fn with_ram(config: EngineConfig, ram: TestRam) -> Self {
        Self::with_mappers(config, ram, RecordingMapper::new)
    }

    fn with_mappers(config: EngineConfig, ram: TestRam, mapper: fn() -> RecordingMapper) -> Self {
        let ram = Arc::new(ram);
        let store = TestChunks::new(CHUNK, REGION_CHUNKS);
        let chunks = store.probe();
        let mut engine = Engine::new(config, ram.clone(), Some(Box::new(store))).expect("the configuration is valid");
        let mut mappers = BTreeMap::new();
        for id in 1..=3 {
            let mapper = mapper();
            chunks.watch(mapper.probe());
            mappers.insert(id, mapper.probe());
            engine.add_endpoint(id, Box::new(mapper)).expect("the endpoint is valid");
        }
        engine.accept_features(engine.features());
        Self { engine, ram, mappers, chunks }
    }

    fn mapper(&self, id: EndpointId) -> &MapperProbe {
        &self.mappers[&id]
    }

    /// Sends a request with a writable part of the right size. Returns the reply.
    fn send(&mut self, request: &[u8]) -> Vec<u8> {
        let size = match request[0] {
            5 => 512 + 4,
            0x40 => 12,
            _ => 4,
        };
        self.send_with_room(request, size)
    }

    fn send_with_room(&mut self, request: &[u8], room: usize) -> Vec<u8> {
        let mut reply = vec![0xa5; room.min(MAX_REPLY)];
        let used = self.engine.handle(request, &mut reply);
        assert!(reply[used..].iter().all(|byte| *byte == 0xa5));
        reply.truncate(used);
        reply
    }

    /// Sends a request and returns its status.
    fn status(&mut self, request: &[u8]) -> u8 {
        let reply = self.send(request);
        let tail = reply.last_chunk::<4>().expect("there is a tail");
        assert_eq!(tail[1..], [0; 3]);
        tail[0]
    }

    /// Sends a request. Returns true if the device does not answer it, as requests of an unknown type.
    fn is_unknown(&mut self, request: &[u8]) -> bool {
        self.send(request).is_empty()
    }

    /// Sends requests that must succeed.
    fn all_ok<const N: usize>(&mut self, requests: [Vec<u8>; N]) {
        for request in requests {
            assert_eq!(self.status(&request), OK, "{request:x?}");
        }
    }

    /// Sends WINDOW_ADD, which must succeed. Returns its `shm_offset`.
    fn add_chunk(&mut self, domain: u32, iova: u64) -> u64 {
        let reply = self.send(&crate::test_utils::window_add(domain, BOTH, iova));
        assert_eq!(reply[8..], [OK, 0, 0, 0]);
        u64::from_le_bytes(*reply.first_chunk().expect("there is an offset"))
    }

    /// Resets the device, and checks that the host is in its initial state.
    fn assert_reset_cleans_host(&mut self) {
        self.engine.reset();
        self.assert_host_is_clean();
    }

    /// Checks that the host is in its initial state.
    fn assert_host_is_clean(&self) {
        assert!(self.mappers.values().all(MapperProbe::is_empty));
        assert_eq!(self.chunks.backed(), 0);
        let counters = self.engine.counters();
        assert_eq!((counters.mappings, counters.mapped_bytes), (0, 0));
        assert_eq!((counters.window_bytes, counters.stuck_ranges), (0, 0));
    }
}

const OK: u8 = Status::Ok as u8;
const UNSUPP: u8 = Status::Unsupp as u8;
const DEVERR: u8 = Status::DevErr as u8;
const INVAL: u8 = Status::Inval as u8;
const RANGE: u8 = Status::Range as u8;
const NOENT: u8 = Status::NoEnt as u8;
const NOMEM: u8 = Status::NoMem as u8;

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Benchmark of virtio-iommu requests, with and without a ring that records the last requests for crash reports. In each turn, the engine
//! handles pairs of MAP and UNMAP requests. The engine's mapper does nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_group, criterion_main};
use devices::crash::RequestRing;
use iommu_bounce::test_utils::{NullMapper, TestRam, attach, map, unmap};
use iommu_bounce::{Engine, EngineConfig, WindowVersion};

const PAGE: u64 = 0x1000;
/// Number of MAP and UNMAP pairs in a turn.
const TURN: u32 = 64;

struct Pairs {
    engine: Engine,
    map: Vec<u8>,
    unmap: Vec<u8>,
}

impl Pairs {
    fn new() -> Self {
        let ram = Arc::new(TestRam::new(&[(0, 0x10_0000)]));
        let mut engine = Engine::new(EngineConfig::default(), ram, None).expect("the configuration is valid");
        engine.add_endpoint(1, Box::new(NullMapper)).expect("the endpoint is new");
        engine.accept_features(u64::MAX);
        let start = 1 << 32;
        let mut pairs = Self {
            engine,
            map: map(1, start, start + PAGE - 1, 0x1000, 3).to_vec(),
            unmap: unmap(1, start, start + PAGE - 1).to_vec(),
        };
        assert_eq!(pairs.engine.handle(&attach(1, 1), &mut [0; 4]), 4);
        pairs
    }

    /// Handles the pairs of one turn. Returns the duration of the turn.
    fn turn(&mut self, ring: Option<&RequestRing>) -> Duration {
        let began = Instant::now();
        for _ in 0..TURN {
            for request in [&self.map, &self.unmap] {
                let kept = ring.map(|ring| ring.begin(request, WindowVersion::V3));
                let mut reply = [0xff; 4];
                self.engine.handle(request, &mut reply);
                assert_eq!(reply[0], 0, "{request:x?}");
                if let (Some(ring), Some(kept)) = (ring, kept) {
                    ring.end(kept, &reply);
                }
            }
        }
        began.elapsed()
    }
}

/// Makes two measurements. Each measurement alternates turns without and with recording. The first measurement counts only the time of
/// turns without recording, and the second only the time of turns with recording.
fn with_and_without(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("map_unmap");
    let (mut pairs, ring) = (Pairs::new(), RequestRing::new());
    for measured in [false, true] {
        let name = if measured { "with_the_ring" } else { "without" };
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|rounds| {
                let mut took = Duration::ZERO;
                let mut turns = 0_u64;
                while turns * u64::from(TURN) < rounds {
                    let (without, with) = (pairs.turn(None), pairs.turn(Some(&ring)));
                    took += if measured { with } else { without };
                    turns += 1;
                }
                // Scale the time to the number of pairs that Criterion requested.
                let done = turns * u64::from(TURN);
                took.mul_f64(rounds as f64 / done as f64)
            });
        });
    }
    group.finish();
}

criterion_group!(benches, with_and_without);
criterion_main!(benches);

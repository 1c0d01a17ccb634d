// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! What a pair of MAP and UNMAP costs in the engine alone, as bytes of requests, on a host that does nothing.

use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use iommu_bounce::test_utils::{NullMapper, TestRam, attach, map, unmap};
use iommu_bounce::{Engine, EngineConfig, Limits};

const PAGE: u64 = 0x1000;

/// The address of a page, above all that is reserved.
fn iova(page: u64) -> u64 {
    (1 << 32) + page * PAGE
}

/// Sends a request that must succeed.
fn send(engine: &mut Engine, request: &[u8]) {
    let mut reply = [0xff; 4];
    assert_eq!(engine.handle(request, &mut reply), 4);
    assert_eq!(reply[0], 0, "{request:x?}");
}

/// An engine with so many mappings of a page each, every second page.
fn engine(live: u64) -> Engine {
    let limits = Limits { max_mappings: 2_000_000, max_domains: 1 };
    let config = EngineConfig { limits, ..EngineConfig::default() };
    let mut engine = Engine::new(config, Arc::new(TestRam::new(&[(0, 0x10_0000)])), None).expect("it is valid");
    engine.add_endpoint(1, Box::new(NullMapper)).expect("it is valid");
    engine.accept_features(u64::MAX);
    send(&mut engine, &attach(1, 1));
    // In an order that leaves the tree as random use would; the step has no divisor in common with powers of ten.
    let mut n = 0;
    for _ in 0..live {
        n = (n + 618_033_989) % live;
        send(&mut engine, &map(1, iova(2 * n), iova(2 * n) + PAGE - 1, 0, 3));
    }
    assert_eq!(engine.counters().mappings, live);
    engine
}

fn pairs(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("map_unmap");
    for live in [100, 1_000_000u64] {
        let mut engine = engine(live);
        // All over the domain, each between two mappings.
        let mut n = 0;
        let (mut map, mut unmap) = (map(1, 0, 0, 0x1000, 3), unmap(1, 0, 0));
        group.bench_function(BenchmarkId::from_parameter(live), |bencher| {
            bencher.iter(|| {
                n = (n + 754_877_669) % live;
                let start = iova(2 * n + 1);
                for request in [&mut map, &mut unmap] {
                    request[8..16].copy_from_slice(&start.to_le_bytes());
                    request[16..24].copy_from_slice(&(start + PAGE - 1).to_le_bytes());
                    send(&mut engine, request);
                }
            });
        });
    }
    group.finish();
}

criterion_group!(benches, pairs);
criterion_main!(benches);

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Benchmarks of the engine alone, with mappers that do nothing. The benchmarks measure pairs of encoded MAP and UNMAP requests,
//! batches of UNMAPs, and MAP_LISTs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use iommu_bounce::test_utils::{NullMapper, TestRam, attach, map, map_list, unmap};
use iommu_bounce::{Engine, EngineConfig, Limits, UnmapRequest};

const PAGE: u64 = 0x1000;

/// Returns the IOVA of page `page`. The IOVA is above all reserved IOVAs.
fn iova(page: u64) -> u64 {
    (1 << 32) + page * PAGE
}

/// Sends a request that must succeed.
fn send(engine: &mut Engine, request: &[u8]) {
    let mut reply = [0xff; 4];
    assert_eq!(engine.handle(request, &mut reply), 4);
    assert_eq!(reply[0], 0, "{request:x?}");
}

/// Returns an engine with `live` mappings of one page each. A gap of one page follows each mapping.
fn engine(live: u64) -> Engine {
    let limits = Limits { max_mappings: 2_000_000, max_domains: 1, ..Limits::default() };
    let config = EngineConfig { limits, ..EngineConfig::default() };
    let mut engine = Engine::new(config, Arc::new(TestRam::new(&[(0, 0x10_0000)])), None).expect("it is valid");
    engine.add_endpoint(1, Box::new(NullMapper)).expect("it is valid");
    engine.accept_features(u64::MAX);
    send(&mut engine, &attach(1, 1));
    // Map the pages in a scattered order, so that the tree has the same shape as after random use. Each page is mapped once, because the
    // step has no common divisor with `live`, a power of ten.
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
        // Map and unmap pages all over the domain. Each of these pages is between two existing mappings.
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

/// Measures UNMAPs of adjacent pages in a domain with 10,000 other mappings. One benchmark serves the UNMAPs one by one, and another
/// benchmark serves them together. The time includes decoding.
fn batches(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("unmap_batch");
    for count in [1, 8, 64u64] {
        let mut engine = engine(10_000);
        let place = 1 << 20;
        let range = |page: u64| (iova(place + page), iova(place + page) + PAGE - 1);
        let maps: Vec<_> = (0..count).map(|page| map(1, range(page).0, range(page).1, 0x1000, 3)).collect();
        let unmaps: Vec<_> = (0..count).map(|page| unmap(1, range(page).0, range(page).1)).collect();
        let mut decoded = Vec::new();
        group.throughput(Throughput::Elements(count));
        for together in [false, true] {
            let name = if together { "together" } else { "alone" };
            group.bench_function(BenchmarkId::new(name, count), |bencher| {
                bencher.iter_custom(|rounds| {
                    let mut took = Duration::ZERO;
                    for _ in 0..rounds {
                        maps.iter().for_each(|request| send(&mut engine, request));
                        let began = Instant::now();
                        if together {
                            decoded.clear();
                            decoded.extend(
                                (0..).zip(&unmaps).filter_map(|(tag, bytes)| UnmapRequest::decode(bytes, 4, tag)),
                            );
                            engine.handle_unmaps(&mut decoded);
                        } else {
                            unmaps.iter().for_each(|request| send(&mut engine, request));
                        }
                        took += began.elapsed();
                    }
                    took
                });
            });
        }
        assert_eq!(engine.counters().mappings, 10_000);
        assert_eq!(engine.counters().failed.unmap, 0);
    }
    group.finish();
}

/// Measures mapping of a buffer whose pages are not adjacent, in a domain with 10,000 other mappings. One benchmark sends a MAP for each
/// page, and another benchmark sends one MAP_LIST.
fn lists(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("map_list");
    for count in [32, 256u64] {
        let mut engine = engine(10_000);
        let place = 1 << 20;
        let gpa = |page: u64| (page * 2 % 256) * PAGE;
        let range = |page: u64| (iova(place + page), iova(place + page) + PAGE - 1);
        let maps: Vec<_> = (0..count).map(|page| map(1, range(page).0, range(page).1, gpa(page), 3)).collect();
        let ranges: Vec<_> = (0..count).map(|page| (gpa(page), PAGE)).collect();
        let list = [map_list(1, range(0).0, 3, &ranges)];
        let unmap = unmap(1, range(0).0, range(count - 1).1);
        group.throughput(Throughput::Elements(count));
        for (name, requests) in [("alone", &maps[..]), ("together", &list[..])] {
            group.bench_function(BenchmarkId::new(name, count), |bencher| {
                bencher.iter_custom(|rounds| {
                    let mut took = Duration::ZERO;
                    for _ in 0..rounds {
                        let began = Instant::now();
                        requests.iter().for_each(|request| send(&mut engine, request));
                        took += began.elapsed();
                        send(&mut engine, &unmap);
                    }
                    took
                });
            });
        }
        assert_eq!(engine.counters().mappings, 10_000);
    }
    group.finish();
}

criterion_group!(benches, pairs, batches, lists);
criterion_main!(benches);

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the engine's memory use: no allocation for a request in steady state, and few bytes for each mapping.

use std::sync::Arc;

use allocation_counter::measure;
use iommu_bounce::test_utils::{NullMapper, TestRam, attach, detach, map, unmap};
use iommu_bounce::{Engine, EngineConfig, Limits, UnmapRequest};

const PAGE: u64 = 0x1000;
/// Maximum bytes of memory for each mapping.
const BYTES_PER_MAPPING: u64 = 64;
const COUNT: u64 = 100_000;

fn engine() -> Engine {
    let limits = Limits { max_mappings: 4_000_000, max_domains: 2, ..Limits::default() };
    let config = EngineConfig { limits, ..EngineConfig::default() };
    let mut engine = Engine::new(config, Arc::new(TestRam::new(&[(0, 0x10_0000)])), None).expect("it is valid");
    engine.add_endpoint(1, Box::new(NullMapper)).expect("it is valid");
    engine.accept_features(u64::MAX);
    send(&mut engine, &attach(1, 1));
    engine
}

fn send(engine: &mut Engine, request: &[u8]) {
    let mut reply = [0xff; 4];
    assert_eq!(engine.handle(request, &mut reply), 4);
    assert_eq!(reply[0], 0, "{request:x?}");
}

fn map_page(page: u64) -> Vec<u8> {
    map(1, page * PAGE, page * PAGE + PAGE - 1, 0, 3)
}

fn unmap_page(page: u64) -> Vec<u8> {
    unmap(1, page * PAGE, page * PAGE + PAGE - 1)
}

/// Returns all numbers below `count` in a scattered order.
fn scattered(count: u64) -> impl Iterator<Item = u64> {
    (0..count).map(move |n| n * 6_700_417 % count)
}

#[test]
fn map_and_unmap_allocate_nothing_in_steady_state() {
    let mut engine = engine();
    let live: Vec<_> = scattered(2000).map(|page| map_page(2 * page)).collect();
    live.iter().for_each(|request| send(&mut engine, request));
    // The requests are sent in bursts, so that nodes split and merge. After each burst, the mappings are the same as before.
    let bursts: Vec<_> = (0..40)
        .map(|burst| {
            let pages: Vec<_> = (0..100).map(|n| 2 * (burst * 50 + n) + 1).collect();
            let maps: Vec<_> = pages.iter().map(|page| map_page(*page)).collect();
            let unmaps: Vec<_> = pages.iter().rev().map(|page| unmap_page(*page)).collect();
            (maps, unmaps)
        })
        .collect();
    let run = |engine: &mut Engine| {
        for (maps, unmaps) in &bursts {
            maps.iter().chain(unmaps).for_each(|request| send(engine, request));
        }
    };
    // Run the bursts several times before measuring, because the fill level of nodes depends on earlier requests.
    (0..5).for_each(|_| run(&mut engine));
    let allocated = measure(|| (0..5).for_each(|_| run(&mut engine)));
    assert_eq!(allocated.count_total, 0, "{allocated:?}");
    assert_eq!(engine.counters().mappings, 2000);
}

#[test]
fn batched_unmaps_allocate_nothing() {
    let mut engine = engine();
    let maps: Vec<_> = (0..64).map(map_page).collect();
    let mut unmaps: Vec<_> = (0..64).filter_map(|page| UnmapRequest::decode(&unmap_page(page), 4, 0)).collect();
    let mut run = || {
        maps.iter().for_each(|request| send(&mut engine, request));
        engine.handle_unmaps(&mut unmaps);
        assert!(unmaps.iter().all(|unmap| unmap.reply() == [0; 4]));
    };
    run();
    let allocated = measure(|| (0..5).for_each(|_| run()));
    assert_eq!(allocated.count_total, 0, "{allocated:?}");
    assert_eq!(engine.counters().merged_unmaps, 6 * 63);
}

#[test]
fn refused_requests_allocate_nothing() {
    let mut engine = engine();
    send(&mut engine, &map_page(1));
    let requests = [
        map_page(1),
        map(1, 1, 2, 0, 3),
        map(9, 0, 0xfff, 0, 3),
        unmap(9, 0, 0xfff),
        attach(7, 1),
        detach(7, 1),
        vec![3; 8],
        vec![0xff; 40],
    ];
    let allocated = measure(|| {
        for request in &requests {
            let mut reply = [0; 4];
            engine.handle(request, &mut reply);
        }
    });
    assert_eq!(allocated.count_total, 0, "{allocated:?}");
}

/// Maps `pages`. Returns the average number of bytes that the engine allocated for a mapping.
fn bytes_per_mapping(pages: impl Iterator<Item = u64>) -> u64 {
    let mut engine = engine();
    let filled = measure(|| {
        for page in pages {
            send(&mut engine, &map_page(page));
        }
    });
    let bytes = u64::try_from(filled.bytes_current).expect("the requests free no earlier memory");
    bytes / engine.counters().mappings
}

#[test]
fn mapping_takes_few_bytes_in_any_order() {
    assert!(bytes_per_mapping(0..COUNT) <= BYTES_PER_MAPPING / 2, "from below");
    assert!(bytes_per_mapping((0..COUNT).rev()) <= BYTES_PER_MAPPING / 2, "from above");
    assert!(bytes_per_mapping(scattered(COUNT)) <= BYTES_PER_MAPPING, "scattered");
    // Inserting from the middle to both ends leaves each node as empty as possible.
    let middle = (0..COUNT).map(|n| if n % 2 == 0 { COUNT + n } else { COUNT - n });
    assert!(bytes_per_mapping(middle) <= BYTES_PER_MAPPING, "from the middle");
}

#[test]
fn ended_domain_frees_its_memory() {
    let mut engine = engine();
    let mut live_and_end = || {
        for page in 0..COUNT / 10 {
            send(&mut engine, &map_page(page));
        }
        send(&mut engine, &detach(1, 1));
        send(&mut engine, &attach(1, 1));
    };
    // Run once before measuring: the engine allocates its record of page tables on the first run, and keeps this record.
    live_and_end();
    let left = measure(live_and_end);
    assert!(left.bytes_current <= 0, "{left:?}");
}

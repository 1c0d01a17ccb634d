// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Feeds the engine requests as bytes, on a host that checks its promises and may fail.
//!
//! The input is a sequence of records: one byte that says what comes, one byte of length or argument, then the bytes of a
//! request. Run it with `cargo fuzz run requests` in `iommu_bounce/`; `-s none` does without a nightly compiler.
#![no_main]

use std::sync::Arc;

use iommu_bounce::test_utils::{ChunkProbe, MapperProbe, RecordingMapper, TestChunks, TestRam};
use iommu_bounce::{Engine, EngineConfig, MAX_REPLY, WindowConfig};
use libfuzzer_sys::fuzz_target;

const CHUNK: u64 = 0x4000;
const APERTURE: u64 = 0xe000_0000;

struct Host {
    mappers: Vec<MapperProbe>,
    chunks: ChunkProbe,
}

fn engine() -> (Engine, Host) {
    let store = TestChunks::new(CHUNK, 4);
    let mut host = Host { mappers: Vec::new(), chunks: store.probe() };
    let config = EngineConfig {
        window: Some(WindowConfig { aperture: APERTURE..=APERTURE + 8 * CHUNK - 1, budget: 3 * CHUNK, threshold: 0 }),
        ..EngineConfig::default()
    };
    let ram = Arc::new(TestRam::new(&[(0, 0x8000), (0x8000, 0x8000)]));
    let engine = Engine::new(config, ram, Some(Box::new(store)));
    let mut engine = engine.expect("the configuration is valid");
    for id in 0..2 {
        let mapper = RecordingMapper::new();
        host.chunks.watch(mapper.probe());
        host.mappers.push(mapper.probe());
        let added = engine.add_endpoint(id, Box::new(mapper));
        added.expect("the endpoint is valid");
    }
    engine.accept_features(u64::MAX);
    (engine, host)
}

/// Does what a record says that is no request.
fn disturb(host: &Host, kind: u8, argument: u8) {
    let mapper = &host.mappers[usize::from(argument >> 7)];
    let after = u32::from(argument & 7);
    match kind {
        0 => mapper.fail_map(after),
        1 => mapper.fail_unmap(after),
        2 => mapper.refuse_unmaps(argument & 1 != 0),
        3 => host.chunks.fail_back(),
        4 => host.chunks.fail_release(),
        _ => mapper.heal(),
    }
}

fuzz_target!(|data: &[u8]| {
    let (mut engine, host) = engine();
    let mut rest = data;
    while let [kind, argument, more @ ..] = rest {
        rest = more;
        if *kind < 8 {
            disturb(&host, *kind, *argument);
            continue;
        }
        let (request, more) = rest.split_at(rest.len().min(usize::from(argument & 0x7f)));
        rest = more;
        let room = if *kind < 32 { usize::from(*kind) } else { MAX_REPLY };
        let mut reply = vec![0x5a; room];
        let used = engine.handle(request, &mut reply);
        assert!(used <= room && reply[used..].iter().all(|byte| *byte == 0x5a));
        let bytes = engine.counters().window_bytes;
        assert!(bytes <= 3 * CHUNK && bytes == u64::from(host.chunks.backed()) * CHUNK);
    }
    host.mappers.iter().for_each(MapperProbe::heal);
    engine.reset();
    engine.reset();
    assert!(host.mappers.iter().all(MapperProbe::is_empty));
    assert_eq!(u64::from(host.chunks.backed()), engine.counters().lost_chunks);
});

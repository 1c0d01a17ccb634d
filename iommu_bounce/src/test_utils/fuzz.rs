// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Sequences of requests and events for the engine, encoded in bytes. A fuzzer generates such bytes, and a test replays stored inputs of
//! the fuzzer.

use std::sync::Arc;

use super::{ChunkProbe, MapperProbe, RecordingMapper, TestChunks, TestGroup, TestRam, unmap};
use crate::{DmaMapper, Engine, EngineConfig, MAX_REPLY, Permissions, UnmapRequest, WindowConfig};

const CHUNK: u64 = 0x4000;
const APERTURE: u64 = 0xe000_0000;
/// Guest-physical address of a device's memory.
const DEVICE: u64 = 0x1_0000;
const BUDGET: u64 = 3 * CHUNK;
/// Number of endpoints. Endpoint 0 is bound to its address space. The host can move the other endpoints.
const ENDPOINTS: u32 = 3;

struct Host {
    mappers: Vec<MapperProbe>,
    group: TestGroup,
    chunks: ChunkProbe,
    ram: Option<Arc<TestRam>>,
}

fn engine() -> (Engine, Host) {
    let store = TestChunks::new(CHUNK, 4);
    let mut host = Host { mappers: Vec::new(), group: TestGroup::default(), chunks: store.probe(), ram: None };
    let config = EngineConfig {
        window: Some(WindowConfig {
            aperture: APERTURE..=APERTURE + 8 * CHUNK - 1,
            budget: BUDGET,
            threshold: 0,
            threshold_write: 0,
        }),
        ..EngineConfig::default()
    };
    let ram = TestRam::new(&[(0, 0x8000), (0x8000, 0x8000)]).with_device(DEVICE, 0x4000, false);
    let ram = Arc::new(ram);
    host.ram = Some(ram.clone());
    let engine = Engine::new(config, ram, Some(Box::new(store)));
    let mut engine = engine.expect("the configuration is valid");
    for id in 0..ENDPOINTS {
        let mut mapper = RecordingMapper::new();
        if id != 0 {
            mapper = host.group.mapper(id, mapper.limits());
        }
        host.chunks.watch(mapper.probe());
        host.mappers.push(mapper.probe());
        engine.add_endpoint(id, Box::new(mapper)).expect("the endpoint is valid");
    }
    engine.accept_features(u64::MAX);
    (engine, host)
}

/// Makes the host fail, or causes an event that is not a request.
fn disturb(engine: &mut Engine, host: &Host, kind: u8, argument: u8) {
    let mapper = &host.mappers[usize::from(argument >> 6) % host.mappers.len()];
    let after = u32::from(argument & 7);
    match kind {
        0 => mapper.fail_map(after),
        1 => mapper.exhaust_map(after),
        2 => mapper.fail_unmap(after),
        3 => mapper.refuse_unmaps(argument & 1 != 0),
        4 => host.chunks.fail_back(),
        5 => host.chunks.fail_release(),
        6 => host.chunks.fail_park(),
        7 => host.group.fail_adopt(after),
        8 => {
            engine.system_reset();
            engine.accept_features(if argument & 1 == 0 { u64::MAX } else { 0 });
        }
        9 => engine.write_bypass(argument),
        10 => {
            engine.set_budget(BUDGET.min(u64::from(argument & 3) * CHUNK)).expect("the budget fits into the region");
            let pages = Some(u64::from(argument >> 2)).filter(|pages| *pages != 0);
            engine.set_max_mapped_bytes(pages.map(|pages| pages << 12)).expect("the limit is not 0");
        }
        12 => {
            if let Some(ram) = &host.ram {
                ram.show_device(argument & 1 == 0);
            }
            let gone = engine.revoke_device_memory(DEVICE, 0x4000);
            assert!(gone || engine.counters().stuck_ranges != 0);
        }
        11 => {
            let access = Permissions::from_bits_truncate(argument.into());
            let iova = APERTURE.wrapping_add(u64::from(argument) << 8);
            if let Err(fault) = engine.translate(u32::from(argument & 3), iova, access) {
                assert_eq!(fault.address, Some(iova));
            }
        }
        _ => {
            host.mappers.iter().for_each(MapperProbe::heal);
            host.group.heal();
        }
    }
}

/// Sends UNMAPs together. Each UNMAP takes three bytes: a domain, a page, and a number of pages. If the high bit of the domain byte is set,
/// the last reserved byte of the request is not zero.
fn unmap_together(engine: &mut Engine, unmaps: &[u8]) {
    let decode = |(tag, bytes): (u16, &[u8; 3])| {
        let [domain, page, count] = bytes.map(u64::from);
        let start = page * 0x1000;
        let last = (start + count * 0x1000).wrapping_sub(1);
        let mut request = unmap(u32::from(bytes[0] & 0x7f), start, last);
        *request.last_mut()? = u8::from(domain & 0x80 != 0);
        UnmapRequest::decode(&request, 4, tag)
    };
    let mut requests: Vec<_> = (0..).zip(unmaps.as_chunks().0).filter_map(decode).collect();
    let before = engine.counters().requests.unmap;
    engine.handle_unmaps(&mut requests);
    assert_eq!(engine.counters().requests.unmap - before, requests.len() as u64);
}

/// Runs `data`. `data` consists of records. A record has one byte for the kind, and one byte for the length or argument. If the record is a
/// request, the bytes of the request follow.
///
/// # Panics
/// Panics if the engine breaks a promise.
pub fn requests(data: &[u8]) {
    let (mut engine, host) = engine();
    let mut rest = data;
    while let [kind, argument, more @ ..] = rest {
        rest = more;
        if *kind == 15 {
            let (unmaps, more) = rest.split_at(rest.len().min(3 * usize::from(argument & 0x1f)));
            rest = more;
            unmap_together(&mut engine, unmaps);
            continue;
        }
        if *kind < 16 {
            disturb(&mut engine, &host, *kind, *argument);
            continue;
        }
        let (request, more) = rest.split_at(rest.len().min(usize::from(argument & 0x7f)));
        rest = more;
        let room = if *kind < 40 { usize::from(*kind - 16) } else { MAX_REPLY };
        let mut reply = vec![0x5a; room];
        let used = engine.handle(request, &mut reply);
        assert!(used <= room && reply[used..].iter().all(|byte| *byte == 0x5a));
        let bytes = engine.counters().window_bytes;
        assert!(bytes <= BUDGET && bytes == u64::from(host.chunks.backed()) * CHUNK);
    }
    host.mappers.iter().for_each(MapperProbe::heal);
    host.group.heal();
    host.chunks.heal();
    // The system reset ends bypass. The next driver accepts no windows, so the parked chunks are released.
    engine.system_reset();
    engine.accept_features(0);
    engine.reset();
    assert!(host.mappers.iter().all(MapperProbe::is_empty));
    assert_eq!(u64::from(host.chunks.backed()), engine.counters().lost_chunks);
}

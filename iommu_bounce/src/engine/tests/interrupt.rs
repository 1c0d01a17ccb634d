// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of long requests while the VMM waits for its vCPUs.

use std::thread;
use std::time::Duration;

use super::*;
use crate::test_utils::*;
use crate::{ConfigError, EngineConfig, Limits};

/// Maximum bytes of a map call. Mapping the first region of RAM takes 64 calls.
const STEP: u64 = 0x1_0000;

fn config() -> EngineConfig {
    EngineConfig { limits: Limits { max_step: STEP, ..Limits::default() }, ..engine_config() }
}

/// Sends a request. Returns true if it was interrupted.
fn is_left(rig: &mut Rig, request: &[u8]) -> bool {
    let unanswered = rig.send(request).is_empty();
    assert_eq!(rig.engine.take_interrupted(), unanswered);
    unanswered
}

#[test]
fn long_mapping_is_split_at_large_page_boundaries() {
    let mut rig = Rig::with_config(config());
    let (first, last) = (PAGE, SECOND_REGION - 1);
    rig.all_ok([attach(1, 1), map(1, first, last, first, BOTH)]);
    let steps: Vec<_> = rig.mapper(1).mappings().iter().map(|(iova, mapping)| (*iova, mapping.len)).collect();
    assert_eq!(steps.len(), 64);
    assert_eq!(steps[..2], [(PAGE, STEP - PAGE), (STEP, STEP)]);
    let before = rig.engine.counters();
    assert_eq!(before.mappings, 1, "the guest made one mapping");
    rig.all_ok([unmap(1, first, last)]);
    assert_eq!(rig.engine.counters().host_unmaps, before.host_unmaps + 1, "one call unmaps all pieces");
    rig.assert_reset_cleans_host();
}

#[test]
fn request_of_one_piece_is_served_while_a_thread_waits() {
    let mut rig = Rig::with_config(config());
    rig.engine.interrupt().want(true);
    rig.all_ok([attach(1, 1), map(1, 0, STEP - 1, 0, BOTH), unmap(1, 0, STEP - 1), detach(1, 1)]);
}

#[test]
fn long_map_and_attach_are_interrupted_while_a_thread_waits() {
    let mut rig = Rig::with_config(config());
    rig.all_ok([attach(1, 1)]);
    let counted = rig.engine.counters().requests;
    let interrupt = rig.engine.interrupt();
    let long = [map(1, 0, SECOND_REGION - 1, 0, BOTH), attach_bypass(2, 2), attach_bypass(1, 2)];
    interrupt.want(true);
    for request in &long {
        assert!(is_left(&mut rig, request));
        assert!(rig.mapper(1).is_empty() && rig.mapper(2).is_empty());
    }
    assert_eq!(rig.engine.counters().requests, counted, "interrupted requests do not count");
    interrupt.want(false);
    for request in &long {
        assert!(!is_left(&mut rig, request));
    }
    assert_eq!(rig.engine.counters().requests.attach, counted.attach + 2);
    assert_eq!(rig.engine.report().endpoints[0].domain, Some(2));
    rig.assert_reset_cleans_host();
}

#[test]
fn long_list_of_short_ranges_is_interrupted_between_ranges() {
    let mut rig = Rig::with_config(config());
    rig.all_ok([attach(1, 1)]);
    let ranges: Vec<_> = (0..4).map(|number| (number * STEP, STEP / 2)).collect();
    let (short, long) = (map_list(1, 0, BOTH, &ranges[..2]), map_list(1, 0, BOTH, &ranges[..3]));
    rig.engine.interrupt().want(true);
    rig.all_ok([short, unmap(1, 0, STEP - 1)]);
    assert!(is_left(&mut rig, &long));
    assert!(rig.mapper(1).is_empty());
    assert_eq!(rig.engine.counters().host_maps, 4, "the third range was mapped");
    rig.engine.interrupt().want(false);
    assert!(!is_left(&mut rig, &long));
    rig.assert_reset_cleans_host();
}

#[test]
fn mapping_in_progress_is_undone_when_interrupted() {
    let mut rig = Rig::with_config(config());
    rig.all_ok([attach(1, 1)]);
    rig.mapper(1).delay(Duration::from_millis(5));
    let (interrupt, mapper) = (rig.engine.interrupt(), rig.mapper(1).clone());
    thread::scope(|scope| {
        scope.spawn(move || {
            while mapper.is_empty() {
                thread::yield_now();
            }
            interrupt.want(true);
        });
        assert!(is_left(&mut rig, &map(1, 0, SECOND_REGION - 1, 0, BOTH)));
    });
    let counters = rig.engine.counters();
    assert!((1..64).contains(&counters.host_maps), "{counters:?}");
    assert!(rig.mapper(1).is_empty());
    assert_eq!((counters.mappings, counters.mapped_bytes, counters.stuck_ranges), (0, 0, 0));
}

#[test]
fn interrupted_attach_keeps_the_old_domain() {
    let mut rig = Rig::with_config(config());
    // Mapping the old domain also takes several steps. The engine maps the old domain again without interruption.
    rig.all_ok([attach(1, 1), map(1, 0, SECOND_REGION - 1, 0, READ)]);
    let before = rig.mapper(1).mappings();
    rig.engine.interrupt().want(true);
    assert!(is_left(&mut rig, &attach_bypass(1, 2)));
    assert_eq!(rig.mapper(1).mappings(), before);
    assert_eq!(rig.engine.report().endpoints[0].domain, Some(1));
}

#[test]
fn bypass_stays_off_while_interrupted_and_survives_a_reset() {
    let mut rig = Rig::with_config(config());
    let interrupt = rig.engine.interrupt();
    interrupt.want(true);
    rig.engine.write_bypass(1);
    assert_eq!(rig.engine.config_space()[36], 0);
    assert!(rig.mapper(1).is_empty() && !rig.engine.take_interrupted());
    interrupt.want(false);
    // Clear the cooldown, because under Miri every mapping counts as slow.
    rig.engine.bypass_rests = None;
    rig.engine.write_bypass(1);
    assert_eq!(rig.engine.config_space()[36], 1);
    // A reset keeps the RAM of endpoints in bypass mode mapped, even while a thread waits.
    interrupt.want(true);
    rig.engine.reset();
    assert!(!rig.mapper(1).is_empty(), "the field survives a reset of the device");
    rig.engine.accept_features(rig.engine.features());
    rig.engine.write_bypass(0);
    assert!(rig.mapper(1).is_empty());
}

#[test]
fn detach_into_bypass_maps_no_ram_while_interrupt_is_wanted() {
    let mut rig = Rig::pinning(config());
    rig.all_ok([attach(1, 1), attach(2, 2), attach(3, 3)]);
    rig.engine.write_bypass(1);
    let interrupt = rig.engine.interrupt();
    interrupt.want(true);
    rig.all_ok([detach(1, 1)]);
    assert!(!rig.engine.take_interrupted());
    assert_eq!(rig.status(&detach(1, 1)), INVAL, "it is detached");
    assert_eq!(rig.engine.counters().host_maps, 0);
    interrupt.want(false);
    // The request is rejected, because the endpoint is detached already. After the request, the engine maps all RAM.
    assert_eq!(rig.status(&detach(1, 1)), INVAL);
    assert_eq!(rig.mapper(1).mapped_bytes(), SECOND_REGION + 0x20_0000);
    rig.engine.write_bypass(0);
    rig.assert_reset_cleans_host();
}

#[test]
fn interrupted_reset_maps_ram_later() {
    let mut rig = Rig::pinning(config());
    rig.all_ok([attach(1, 1), attach(2, 2), attach(3, 3)]);
    rig.engine.write_bypass(1);
    let interrupt = rig.engine.interrupt();
    interrupt.want(true);
    rig.engine.reset();
    assert_eq!(rig.engine.counters().host_maps, 0);
    assert!(!rig.engine.take_interrupted());
    rig.engine.catch_up();
    assert_eq!(rig.engine.counters().host_maps, 0);
    interrupt.want(false);
    // `catch_up` maps the RAM even if no driver sends a request.
    rig.engine.catch_up();
    assert_eq!([1, 2, 3].map(|id| rig.mapper(id).mapped_bytes()), [SECOND_REGION + 0x20_0000; 3]);
}

#[test]
fn reset_under_interrupt_maps_one_piece_ram_for_one_endpoint() {
    let mut rig = Rig::pinning(engine_config());
    rig.all_ok([attach(1, 1), attach(2, 2), attach(3, 3)]);
    rig.engine.write_bypass(1);
    let interrupt = rig.engine.interrupt();
    interrupt.want(true);
    rig.engine.reset();
    assert_eq!([1, 2, 3].map(|id| rig.mapper(id).is_empty()), [false, true, true]);
    interrupt.want(false);
    // Clear the cooldown, because under Miri every mapping counts as slow.
    rig.engine.bypass_rests = None;
    rig.engine.accept_features(rig.engine.features());
    rig.all_ok([probe(1)]);
    assert_eq!([1, 2, 3].map(|id| rig.mapper(id).mapped_bytes()), [SECOND_REGION + 0x20_0000; 3]);
}

#[test]
fn max_piece_not_power_of_two_or_below_granule_is_refused() {
    for max_step in [0, 3 * STEP, PAGE / 2] {
        let config = EngineConfig { limits: Limits { max_step, ..Limits::default() }, ..engine_config() };
        let store = TestChunks::new(CHUNK, REGION_CHUNKS);
        let engine = Engine::new(config, Arc::new(TestRam::new(&[(0, 0x1000)])), Some(Box::new(store)));
        assert!(matches!(engine, Err(ConfigError::Step(step)) if step == max_step));
    }
}

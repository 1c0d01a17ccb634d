// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of ATTACH and DETACH, and of the lifetime of a domain.

use std::time::{Duration, Instant};

use super::*;
use crate::test_utils::*;
use crate::{Limits, MapperLimits};

#[test]
fn unknown_endpoint_is_no_entry() {
    let mut rig = Rig::new();
    assert_eq!(rig.status(&attach(9, 1)), NOENT);
    assert_eq!(rig.status(&detach(9, 1)), NOENT);
}

#[test]
fn domain_outside_its_range_is_out_of_range() {
    let mut rig = Rig::new();
    assert_eq!(rig.status(&attach(1, 0)), RANGE);
    assert_eq!(rig.status(&attach(1, 101)), RANGE);
    assert_eq!(rig.status(&attach(1, 100)), OK);
}

#[test]
fn flags_and_reserved_bytes_are_invalid() {
    let mut rig = Rig::new();
    for (at, value) in [(12, 2), (13, 1), (15, 1), (16, 1), (19, 1)] {
        let mut request = attach(1, 1);
        request[at] = value;
        assert_eq!(rig.status(&request), INVAL, "byte {at}");
    }
}

#[test]
fn reserved_bytes_of_detach_are_ignored() {
    let mut rig = Rig::new();
    rig.all_ok([attach(1, 1)]);
    let mut request = detach(1, 1);
    request[12..].fill(0xff);
    assert_eq!(rig.status(&request), OK);
}

#[test]
fn detach_from_another_domain_is_invalid() {
    let mut rig = Rig::new();
    rig.all_ok([attach(1, 1), attach(2, 2)]);
    assert_eq!(rig.status(&detach(1, 2)), INVAL);
    assert_eq!(rig.status(&detach(1, 3)), INVAL);
    assert_eq!(rig.status(&detach(3, 1)), INVAL);
    assert_eq!(rig.status(&detach(1, 1)), OK);
}

#[test]
fn attach_again_changes_nothing() {
    let mut rig = Rig::new();
    rig.all_ok([attach(1, 1), map(1, 0, 0xfff, 0, READ)]);
    let before = rig.mapper(1).mappings();
    rig.all_ok([attach(1, 1)]);
    assert_eq!(rig.mapper(1).mappings(), before);
    assert_eq!(rig.engine.counters().host_maps, 1);
}

#[test]
fn later_endpoint_gets_mappings_and_chunks() {
    let mut rig = Rig::new();
    rig.all_ok([attach(1, 1), map(1, 0x1000, 0x2fff, 0, READ), map(1, 0x3000, 0x3fff, 0, WRITE)]);
    rig.add_chunk(1, APERTURE);
    rig.all_ok([attach(2, 1)]);
    assert_eq!(rig.mapper(1).mappings(), rig.mapper(2).mappings());
    assert_eq!(rig.mapper(2).mappings().len(), 3);
    let counters = rig.engine.counters();
    assert_eq!((counters.mappings, counters.mapped_bytes), (2, 0x6000));
    assert_eq!(counters.window_bytes, CHUNK);
}

#[test]
fn domain_exists_until_its_last_endpoint_leaves() {
    let mut rig = Rig::new();
    rig.all_ok([attach(1, 1), attach(2, 1), map(1, 0, 0xfff, 0, READ)]);
    rig.add_chunk(1, APERTURE);
    rig.all_ok([detach(1, 1)]);
    assert!(rig.mapper(1).is_empty());
    assert_eq!(rig.mapper(2).mappings().len(), 2);
    assert_eq!(rig.engine.counters().mapped_bytes, 0x1000);
    rig.all_ok([detach(2, 1)]);
    rig.assert_host_is_clean();
    assert_eq!(rig.status(&map(1, 0, 0xfff, 0, READ)), NOENT);
    rig.all_ok([attach(1, 1)]);
    assert!(rig.mapper(1).is_empty(), "the number stands for a new domain");
    assert_eq!(rig.status(&window_del(1, APERTURE)), NOENT);
}

#[test]
fn attach_elsewhere_leaves_the_old_domain() {
    let mut rig = Rig::new();
    rig.all_ok([attach(1, 1), attach(2, 2), map(1, 0, 0xfff, 0, READ), map(2, 0, 0x1fff, 0x8000, WRITE)]);
    rig.add_chunk(1, APERTURE);
    rig.all_ok([attach(1, 2)]);
    assert_eq!(rig.mapper(1).mappings(), rig.mapper(2).mappings());
    assert_eq!(rig.chunks.backed(), 0, "the old domain has ended");
    assert_eq!(rig.status(&map(1, 0, 0xfff, 0, READ)), NOENT);
}

#[test]
fn attach_is_unsupported_if_endpoint_cannot_map_the_domain() {
    let mut rig = Rig::new();
    let mapper = RecordingMapper::with_ranges(vec![0x10_0000..=0xfedf_ffff]);
    let narrow = mapper.probe();
    let added = rig.engine.add_endpoint(4, Box::new(mapper));
    added.expect("it is valid");
    rig.all_ok([attach(1, 1), map(1, 0x1000, 0x1fff, 0, READ)]);
    assert_eq!(rig.status(&attach(4, 1)), UNSUPP);
    rig.all_ok([unmap(1, 0x1000, 0x1fff), attach(4, 1)]);
    assert_eq!(rig.status(&map(1, 0x1000, 0x1fff, 0, READ)), RANGE);
    assert!(narrow.is_empty() && rig.mapper(1).is_empty());
}

#[test]
fn endpoint_without_room_gets_no_memory() {
    let mut rig = Rig::new();
    let mapper = RecordingMapper::with_limits(MapperLimits {
        page_size_mask: 0x1000,
        iova_ranges: vec![0..=u64::MAX],
        max_mappings: Some(1),
    });
    let small = mapper.probe();
    let added = rig.engine.add_endpoint(4, Box::new(mapper));
    added.expect("it is valid");
    rig.all_ok([attach(1, 1), map(1, 0, 0xfff, 0, READ)]);
    rig.add_chunk(1, APERTURE);
    assert_eq!(rig.status(&attach(4, 1)), NOMEM);
    assert!(small.is_empty());
    rig.all_ok([unmap(1, 0, 0xfff), attach(4, 1)]);
    assert_eq!(rig.status(&map(1, 0, 0xfff, 0, READ)), NOMEM);
    assert_eq!(rig.mapper(1).mappings(), small.mappings());
}

#[test]
fn domains_have_a_limit() {
    let mut config = engine_config();
    config.limits = Limits { max_domains: 2, ..Limits::default() };
    let mut rig = Rig::with_config(config);
    rig.all_ok([attach(1, 1), attach(2, 2)]);
    assert_eq!(rig.status(&attach(3, 3)), NOMEM);
    rig.all_ok([attach(3, 1)]);
    assert_eq!(rig.status(&attach(3, 3)), NOMEM, "domain 1 stays");
    // Domain 2 ends in the same step, so the limit allows domain 3.
    rig.all_ok([attach(2, 3)]);
}

#[test]
fn reset_forgets_everything() {
    let mut rig = Rig::new();
    rig.all_ok([attach(1, 1), attach(2, 1), attach(3, 2), map(1, 0, 0xfff, 0, READ), map(2, 0, 0xfff, 0, READ)]);
    rig.add_chunk(1, APERTURE);
    rig.add_chunk(2, APERTURE);
    rig.assert_reset_cleans_host();
    assert!(rig.is_unknown(&window_add(1, BOTH, APERTURE)));
    assert_eq!(rig.status(&map(1, 0, 0xfff, 0, READ)), UNSUPP);
    rig.engine.accept_features(rig.engine.features());
    assert_eq!(rig.status(&map(1, 0, 0xfff, 0, READ)), NOENT);
    rig.all_ok([attach(1, 1), map(1, 0, 0xfff, 0, READ)]);
}

#[test]
fn removed_endpoint_leaves_nothing() {
    let mut rig = Rig::new();
    rig.all_ok([attach(1, 1), map(1, 0, 0xfff, 0, READ)]);
    rig.add_chunk(1, APERTURE);
    rig.engine.remove_endpoint(1).expect("it exists");
    rig.assert_host_is_clean();
    assert_eq!(rig.status(&attach(1, 1)), NOENT);
    let error = rig.engine.remove_endpoint(1).err().expect("it is gone");
    assert_eq!(error.to_string(), "endpoint 0x1 does not exist");
}

/// Returns an engine whose endpoints are in separate domains, and would be in bypass mode when unattached. The host takes `call`
/// to map the RAM of an endpoint.
fn rig_with_bypass(call: Duration) -> Rig {
    let mut rig = Rig::pinning(engine_config());
    rig.all_ok([attach(1, 1), attach(2, 2), attach(3, 3)]);
    rig.engine.write_bypass(1);
    (1..=3).for_each(|id| rig.mapper(id).delay(call / 3));
    rig
}

/// Returns the endpoints that can access RAM.
fn reach_ram(rig: &Rig) -> [bool; 3] {
    [1, 2, 3].map(|id| !rig.mapper(id).is_empty())
}

#[test]
fn slow_detach_into_bypass_defers_ram_of_later_detaches() {
    let mut rig = rig_with_bypass(Duration::from_millis(600));
    rig.engine.begin_batch();
    let answers = [1, 2, 3].map(|id| rig.status(&detach(id, id)));
    rig.engine.end_batch();
    assert_eq!((answers, reach_ram(&rig)), ([OK; 3], [true, false, false]));
    assert_eq!(rig.status(&detach(2, 2)), INVAL, "it is detached");
    (1..=3).for_each(|id| rig.mapper(id).delay(Duration::ZERO));
    // Attaching the endpoint to a domain and detaching it again does not map its RAM sooner.
    rig.all_ok([attach(2, 2), map(2, 0, PAGE - 1, 0, READ)]);
    assert_eq!((rig.status(&detach(2, 2)), reach_ram(&rig)), (OK, [true, false, false]));
    rig.engine.bypass_rests = None;
    rig.all_ok([probe(1)]);
    assert_eq!(reach_ram(&rig), [true; 3]);
    rig.engine.write_bypass(0);
    rig.assert_host_is_clean();
}

#[test]
fn slow_batch_defers_ram_of_a_detach_into_bypass() {
    let mut rig = rig_with_bypass(Duration::ZERO);
    rig.mapper(3).delay(Duration::from_millis(1100));
    rig.engine.begin_batch();
    rig.all_ok([map(3, 0, PAGE - 1, 0, READ)]);
    rig.all_ok([detach(1, 1), detach(2, 2)]);
    rig.all_ok([unmap(3, 0, PAGE - 1), probe(1)]);
    assert_eq!(reach_ram(&rig), [false; 3]);
    rig.engine.end_batch();
    rig.all_ok([probe(1)]);
    assert_eq!(reach_ram(&rig), [true, true, false]);
}

#[test]
fn postponed_ram_counts_for_the_batch_that_maps_it() {
    let mut rig = rig_with_bypass(Duration::from_millis(1100));
    rig.engine.bypass_rests = Some(Instant::now() + Duration::from_secs(3600));
    rig.all_ok([detach(1, 1)]);
    assert_eq!(reach_ram(&rig), [false; 3]);
    rig.engine.bypass_rests = None;
    rig.engine.begin_batch();
    rig.all_ok([probe(1)]);
    assert_eq!(reach_ram(&rig), [true, false, false]);
    assert_eq!(rig.status(&map(2, 0, PAGE - 1, 0, READ)), NOMEM);
    rig.engine.end_batch();
}

#[test]
fn slow_resets_map_bypass_ram_and_defer_a_later_detach() {
    let mut rig = rig_with_bypass(Duration::from_millis(300));
    for _ in 0..2 {
        rig.engine.reset();
        rig.engine.accept_features(rig.engine.features());
        assert_eq!(reach_ram(&rig), [true; 3], "RAM is mapped without any request of a driver");
        rig.all_ok([attach(1, 1), attach(2, 2)]);
    }
    rig.all_ok([detach(1, 1)]);
    assert_eq!(reach_ram(&rig), [false, false, true]);
    // A reset of the VM ends the cooldown, so that the next guest need not wait.
    rig.engine.system_reset();
    rig.engine.accept_features(rig.engine.features());
    rig.engine.write_bypass(1);
    assert_eq!(reach_ram(&rig), [true; 3]);
    rig.engine.write_bypass(0);
    rig.assert_host_is_clean();
}

#[test]
fn detach_into_bypass_without_pinning_is_never_deferred() {
    let mut rig = Rig::new();
    rig.all_ok([attach(1, 1), attach(2, 2), attach(3, 3)]);
    rig.engine.write_bypass(1);
    rig.engine.bypass_rests = Some(Instant::now() + Duration::from_secs(3600));
    rig.all_ok([detach(1, 1)]);
    assert_eq!(reach_ram(&rig), [true, false, false]);
}

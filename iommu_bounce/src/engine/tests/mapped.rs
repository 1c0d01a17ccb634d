// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the cap on mapped bytes, and of pinned memory.

use super::*;
use crate::test_utils::*;
use crate::{ConfigError, EngineState, Limits, RestoreError};

const MAX: u64 = 8 * PAGE;

/// Returns an engine that may map eight pages, with endpoints 1 and 2 in domain 1, which maps four pages in total.
fn rig() -> Rig {
    let limits = Limits { max_mapped_bytes: MAX, ..Limits::default() };
    let mut rig = Rig::with_config(EngineConfig { limits, ..engine_config() });
    rig.all_ok([attach(1, 1), attach(2, 1), map(1, 0, 2 * PAGE - 1, 0, READ)]);
    assert_eq!(rig.engine.counters().mapped_bytes, 4 * PAGE);
    rig
}

#[test]
fn map_above_the_cap_gets_nomem_and_changes_nothing() {
    let mut rig = rig();
    let before = rig.engine.counters();
    assert_eq!(rig.status(&map(1, 0x10_0000, 0x10_0000 + 3 * PAGE - 1, 0, BOTH)), NOMEM);
    let after = rig.engine.counters();
    assert_eq!((after.mappings, after.mapped_bytes, after.host_maps), (1, 4 * PAGE, before.host_maps));
    assert_eq!(rig.mapper(1).mappings().len(), 1);
    // The total may reach the cap exactly. An UNMAP makes room for a new mapping.
    rig.all_ok([map(1, 0x10_0000, 0x10_0000 + 2 * PAGE - 1, 0, BOTH)]);
    assert_eq!(rig.status(&map(1, 0x20_0000, 0x20_0fff, 0, BOTH)), NOMEM);
    rig.all_ok([unmap(1, 0, 0xf_ffff), map(1, 0x20_0000, 0x20_0fff, 0, BOTH)]);
    // A request that breaks another rule still gets the status of that rule.
    assert_eq!(rig.status(&map(1, 0x20_0000, 0x20_0fff, 0, BOTH)), INVAL);
    assert_eq!(rig.status(&map(1, 0x30_0001, 0x30_0fff, 0, BOTH)), RANGE);
}

#[test]
fn page_that_is_mapped_twice_counts_twice() {
    let mut rig = rig();
    rig.all_ok([map(1, 0x10_0000, 0x10_0fff, 0, READ), map(1, 0x20_0000, 0x20_0fff, 0, READ)]);
    assert_eq!(rig.engine.counters().mapped_bytes, MAX);
    assert_eq!(rig.status(&map(1, 0x30_0000, 0x30_0fff, 0, READ)), NOMEM);
}

#[test]
fn length_over_all_address_spaces_does_not_wrap() {
    let mut rig = rig();
    let last = (1 << 48) - 1;
    rig.all_ok([detach(1, 1), detach(2, 1), attach(1, 2), attach(2, 2)]);
    assert_eq!(rig.status(&map(2, 0x10_0000_0000, last, 0, READ)), NOMEM);
    rig.engine.set_max_mapped_bytes(None).unwrap();
    assert_eq!(rig.status(&map(2, 0x10_0000_0000, last, 0, READ)), INVAL, "the guest has no such RAM");
}

#[test]
fn windows_do_not_count() {
    let mut rig = rig();
    rig.add_chunk(1, APERTURE);
    rig.add_chunk(1, APERTURE + CHUNK);
    rig.all_ok([map(1, 0x10_0000, 0x10_0000 + 2 * PAGE - 1, 0, BOTH)]);
    rig.add_chunk(1, APERTURE + 2 * CHUNK);
}

#[test]
fn lowered_cap_keeps_mappings_and_refuses_new_ones() {
    let mut rig = rig();
    rig.engine.set_max_mapped_bytes(Some(2 * PAGE)).unwrap();
    assert_eq!(rig.engine.counters().mapped_bytes, 4 * PAGE);
    assert_eq!(rig.status(&map(1, 0x10_0000, 0x10_0fff, 0, READ)), NOMEM);
    rig.all_ok([unmap(1, 0, 2 * PAGE - 1), map(1, 0x10_0000, 0x10_0fff, 0, READ)]);
    assert_eq!(rig.status(&map(1, 0, 0xfff, 0, READ)), NOMEM);
    rig.engine.set_max_mapped_bytes(Some(4 * PAGE)).unwrap();
    rig.all_ok([map(1, 0, 0xfff, 0, READ)]);
    assert!(matches!(rig.engine.set_max_mapped_bytes(Some(0)), Err(ConfigError::ZeroLimit("max_mapped_bytes"))));
    assert_eq!(rig.engine.max_mapped_bytes(), Some(4 * PAGE));
    rig.engine.set_max_mapped_bytes(None).unwrap();
    assert_eq!(rig.engine.max_mapped_bytes(), None);
    rig.all_ok([map(1, 0x20_0000, 0x2f_ffff, 0, READ)]);
}

#[test]
fn attach_counts_what_it_maps_and_what_it_unmaps() {
    let mut rig = rig();
    // The attach maps two more pages for endpoint 3, which the cap allows.
    rig.all_ok([attach(3, 1)]);
    rig.all_ok([detach(3, 1), attach(3, 2), map(2, 0, 3 * PAGE - 1, 0, READ)]);
    assert_eq!(rig.status(&attach(3, 1)), OK, "it unmaps more than it maps");
    rig.all_ok([attach(3, 3), map(3, 0, PAGE - 1, 0, READ), attach(2, 3), map(3, PAGE, 3 * PAGE - 1, 0, READ)]);
    assert_eq!(rig.engine.counters().mapped_bytes, MAX);
    // Endpoint 1 would map three pages instead of two, which exceeds the cap. So the endpoint stays in its domain.
    assert_eq!(rig.status(&attach(1, 3)), NOMEM);
    assert_eq!((rig.mapper(1).mapped_bytes(), rig.engine.counters().mapped_bytes), (2 * PAGE, MAX));
    // Even above a lowered cap, an endpoint can move to a domain that maps no more than its old domain.
    rig.engine.set_max_mapped_bytes(Some(PAGE)).unwrap();
    rig.all_ok([attach(2, 1)]);
}

#[test]
fn bypass_above_the_cap_is_refused() {
    let mut rig = rig();
    assert_eq!(rig.status(&attach_bypass(3, 7)), NOMEM);
    rig.engine.write_bypass(1);
    assert_eq!(rig.engine.config_space()[36], 0, "it reads back unchanged");
    assert!(rig.mapper(3).is_empty());
    rig.engine.set_max_mapped_bytes(None).unwrap();
    // Clear the cooldown, because under Miri every mapping counts as slow.
    rig.engine.bypass_rests = None;
    rig.engine.write_bypass(1);
    assert_eq!(rig.engine.config_space()[36], 1);
    // With a low cap, an endpoint that leaves its domain has no access, although bypass is on.
    rig.engine.set_max_mapped_bytes(Some(MAX)).unwrap();
    assert_eq!(rig.status(&detach(1, 1)), NOMEM);
    assert!(rig.mapper(1).is_empty());
    assert!(matches!(rig.engine.add_ram(1 << 33, 0x10_0000), Err(ConfigError::EndpointBypass(_))));
}

/// Bytes of RAM in a rig.
const RAM: u64 = SECOND_REGION + 0x20_0000;

/// Returns an engine whose endpoints are in bypass mode from the start. The cap is below the size of RAM.
fn rig_with_bypass() -> Rig {
    let limits = Limits { max_mapped_bytes: MAX, ..Limits::default() };
    Rig::with_config(EngineConfig { limits, bypass: true, ..engine_config() })
}

/// Returns the bytes of RAM that each endpoint can access.
fn reached(rig: &Rig) -> [u64; 3] {
    [1, 2, 3].map(|id| rig.mapper(id).mapped_bytes())
}

#[test]
fn initial_bypass_is_exempt_from_and_not_counted_in_the_cap() {
    let mut rig = rig_with_bypass();
    assert_eq!(reached(&rig), [RAM; 3]);
    rig.all_ok([attach(1, 1), map(1, 0, MAX - 1, 0, BOTH)]);
    assert_eq!(rig.status(&map(1, 0x10_0000, 0x10_0fff, 0, READ)), NOMEM, "mappings of a driver count");
    assert_eq!(rig.engine.counters().mapped_bytes, MAX + 2 * RAM);
    // A bypass domain counts too, even if the endpoint could access all RAM before.
    assert_eq!(rig.status(&attach_bypass(2, 2)), NOMEM);
    assert_eq!(reached(&rig), [MAX, RAM, RAM]);
    rig.all_ok([detach(1, 1)]);
    assert_eq!(reached(&rig), [RAM; 3]);
    rig.engine.write_bypass(0);
    rig.assert_host_is_clean();
}

#[test]
fn initial_bypass_returns_at_reset_under_a_lowered_cap() {
    let mut rig = Rig::with_config(EngineConfig { bypass: true, ..engine_config() });
    rig.all_ok([attach(1, 1), attach(2, 1), attach(3, 2)]);
    rig.engine.set_max_mapped_bytes(Some(PAGE)).unwrap();
    rig.engine.system_reset();
    assert_eq!(reached(&rig), [RAM; 3]);
    rig.engine.set_max_mapped_bytes(None).unwrap();
    assert_eq!(reached(&rig), [RAM; 3]);
}

#[test]
fn engine_with_initial_bypass_restores_under_a_lowered_cap() {
    let mut old = Rig::with_config(EngineConfig { bypass: true, ..engine_config() });
    old.all_ok([attach(1, 1), attach(2, 1), attach(3, 2), map(1, 0, 8 * PAGE - 1, 0, BOTH)]);
    old.engine.set_max_mapped_bytes(Some(MAX)).unwrap();
    let mut new = rig_with_bypass();
    new.engine.reset();
    new.engine.restore(&old.engine.state()).unwrap();
    assert_eq!((reached(&new), new.engine.max_mapped_bytes()), ([MAX, MAX, 0], Some(MAX)));
    assert_eq!(new.status(&map(2, 0, 0xfff, 0, READ)), NOMEM);
}

#[test]
fn added_ram_of_initial_bypass_is_exempt_from_the_cap() {
    const LATER: (u64, usize) = (1 << 33, 0x10_0000);
    let limits = Limits { max_mapped_bytes: MAX, ..Limits::default() };
    let config = EngineConfig { limits, bypass: true, ..engine_config() };
    let mut rig = Rig::with_ram(config, TestRam::new(&[(0, 0x10_0000), LATER]).with_later(LATER.0));
    rig.engine.add_ram(LATER.0, LATER.1 as u64).unwrap();
    assert_eq!(reached(&rig), [0x20_0000; 3]);
    rig.all_ok([attach(1, 1), map(1, 0, MAX - 1, 0, BOTH)]);
}

#[test]
fn raised_cap_maps_ram_for_endpoints_in_bypass() {
    let mut rig = Rig::new();
    rig.engine.write_bypass(1);
    rig.all_ok([attach(1, 1), attach(2, 2), attach(3, 3)]);
    rig.engine.set_max_mapped_bytes(Some(MAX)).unwrap();
    assert_eq!([detach(1, 1), detach(2, 2)].map(|request| rig.status(&request)), [NOMEM; 2]);
    rig.engine.set_max_mapped_bytes(Some(RAM)).unwrap();
    assert_eq!(reached(&rig), [RAM, 0, 0], "the cap has room for one endpoint");
    rig.engine.set_max_mapped_bytes(None).unwrap();
    assert_eq!(reached(&rig), [RAM, RAM, 0]);
    // A lowered cap unmaps nothing.
    rig.engine.set_max_mapped_bytes(Some(MAX)).unwrap();
    assert_eq!(reached(&rig), [RAM, RAM, 0]);
}

#[test]
fn cap_is_restored_with_mappings_that_exceed_it() {
    let mut old = rig();
    old.engine.set_max_mapped_bytes(Some(PAGE)).unwrap();
    let text = serde_json::to_string(&old.engine.state()).unwrap();
    let mut state: EngineState = serde_json::from_str(&text).unwrap();
    let mut new = Rig::new();
    new.engine.reset();
    new.engine.restore(&state).unwrap();
    assert_eq!((new.engine.max_mapped_bytes(), new.engine.counters().mapped_bytes), (Some(PAGE), 4 * PAGE));
    assert_eq!(new.status(&map(1, 0x10_0000, 0x10_0fff, 0, READ)), NOMEM);
    // A rejected state leaves the cap unchanged.
    state.max_mapped_bytes = Some(0);
    let mut fresh = rig();
    fresh.engine.reset();
    assert_eq!(fresh.engine.restore(&state), Err(RestoreError::MappedBytes));
    assert_eq!((fresh.engine.max_mapped_bytes(), fresh.engine.counters().mapped_bytes), (Some(MAX), 0));
}

#[test]
fn only_address_spaces_of_the_hosts_iommu_pin() {
    let mut rig = Rig::new();
    let mapper = RecordingMapper::new().with_page_tables();
    rig.mappers.insert(4, mapper.probe());
    rig.engine.add_endpoint(4, Box::new(mapper)).unwrap();
    rig.all_ok([attach(1, 1), attach(4, 1), map(1, 0, 2 * PAGE - 1, 0, READ)]);
    rig.add_chunk(1, APERTURE);
    let counters = rig.engine.counters();
    assert_eq!((counters.mapped_bytes, counters.pinned_bytes), (4 * PAGE, 2 * PAGE + CHUNK));
    let endpoints = rig.engine.report().endpoints;
    assert_eq!((endpoints[0].mapped_bytes, endpoints[0].pinned_bytes), (2 * PAGE, 0));
    assert_eq!(endpoints[3].pinned_bytes, 2 * PAGE + CHUNK);
    rig.all_ok([unmap(1, 0, 2 * PAGE - 1), window_del(1, APERTURE)]);
    let counters = rig.engine.counters();
    assert_eq!((counters.pinned_bytes, counters.peak_pinned_bytes), (0, 2 * PAGE + CHUNK));
    // A range that the host fails to unmap stays pinned as long as its address space exists.
    rig.all_ok([map(1, 0, PAGE - 1, 0, READ)]);
    rig.mapper(4).refuse_unmaps(true);
    assert_eq!(rig.status(&detach(4, 1)), DEVERR);
    assert_eq!(rig.engine.counters().pinned_bytes, PAGE);
    rig.engine.remove_endpoint(4).unwrap();
    assert_eq!(rig.engine.counters().pinned_bytes, 0);
}

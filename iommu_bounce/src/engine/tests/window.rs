// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of WINDOW_ADD and WINDOW_DEL. The tests cover each row of the table of statuses in docs/bounce-windows.md, and check the resulting
//! state.

use super::*;
use crate::test_utils::*;
use crate::{Permissions, spec};

#[test]
fn add_maps_a_chunk_for_every_endpoint() {
    let mut rig = Rig::attached();
    rig.all_ok([attach(2, 1), attach(3, 2)]);
    let reply = rig.send(&window_add(1, WRITE, APERTURE + CHUNK));
    assert_eq!(reply.len(), spec::WINDOW_ADD_REPLY);
    assert_eq!(reply[..8], 0u64.to_le_bytes());
    for id in [1, 2] {
        let mappings = rig.mapper(id).mappings();
        let mapping = mappings[&(APERTURE + CHUNK)];
        assert_eq!(mapping.len, CHUNK);
        assert_eq!(mapping.permissions, Permissions::WRITE);
    }
    assert!(rig.mapper(3).is_empty());
    let counters = rig.engine.counters();
    assert_eq!((counters.mappings, counters.mapped_bytes), (0, 0));
    assert_eq!(counters.window_bytes, CHUNK);
}

/// Returns an engine whose aperture is above 4 GiB.
fn high() -> Rig {
    let window = WindowConfig { aperture: HIGH..=HIGH + APERTURE_CHUNKS * CHUNK - 1, ..window_config() };
    Rig::with_config(EngineConfig { window: Some(window), ..engine_config() })
}

#[test]
fn window_above_4_gib_has_its_own_feature_in_version_2_only() {
    let windows = |rig: &Rig| rig.engine.features() & feature::ANY_BOUNCE_WINDOW;
    assert_eq!(windows(&Rig::attached()), feature::BOUNCE_WINDOW | feature::BOUNCE_WINDOW_V2);
    let mut rig = high();
    assert_eq!(windows(&rig), feature::BOUNCE_WINDOW | feature::BOUNCE_WINDOW_V2_HIGH);
    let start = rig.engine.config_space()[spec::config::WINDOW_IOVA_START..][..8].to_vec();
    assert_eq!(start, HIGH.to_le_bytes());
    rig.all_ok([attach(1, 1), map(1, APERTURE, APERTURE + 0xfff, 0, READ)]);
    assert_eq!(rig.status(&map(1, HIGH, HIGH + 0xfff, 0, READ)), RANGE);
    assert_eq!(rig.status(&window_add(1, BOTH, APERTURE)), RANGE);
    assert_eq!(rig.add_chunk(1, HIGH + CHUNK), 0);
    assert!(rig.mapper(1).translate(HIGH + CHUNK).is_some());
    rig.all_ok([window_del(1, HIGH + CHUNK)]);
}

#[test]
fn driver_that_does_not_know_windows_above_4_gib_sees_none() {
    let mut rig = high();
    rig.engine.reset();
    rig.engine.accept_features(feature::MAP_UNMAP | feature::BOUNCE_WINDOW_V2);
    rig.all_ok([attach(1, 1), map(1, HIGH, HIGH + 0xfff, 0, READ)]);
    assert!(rig.is_unknown(&window_add(1, BOTH, HIGH + CHUNK)));
}

#[test]
fn driver_of_version_2_uses_its_own_layout() {
    for (mut rig, start, feature) in
        [(Rig::new(), APERTURE, feature::BOUNCE_WINDOW_V2), (high(), HIGH, feature::BOUNCE_WINDOW_V2_HIGH)]
    {
        rig.engine.reset();
        rig.engine.accept_features(feature::MAP_UNMAP | feature);
        let iova = start + CHUNK;
        rig.all_ok([attach(1, 1)]);
        let reply = rig.send(&window_add_v2(1, BOTH, iova));
        assert_eq!(reply[8..], [OK, 0, 0, 0]);
        assert!(rig.mapper(1).translate(iova).is_some());
        assert_eq!(rig.status(&window_del(1, iova)), INVAL, "the address is in a field that is reserved in version 2");
        rig.all_ok([window_del_v2(1, iova)]);
        assert!(rig.mapper(1).is_empty());
    }
}

#[test]
fn driver_that_accepts_two_versions_uses_the_later_one() {
    let mut rig = Rig::new();
    rig.engine.reset();
    rig.engine.accept_features(rig.engine.features());
    rig.all_ok([attach(1, 1)]);
    rig.add_chunk(1, APERTURE);
    let reply = rig.send(&window_add_v2(1, BOTH, APERTURE + CHUNK));
    assert_ne!(reply[8], OK);
}

#[test]
fn chunks_of_different_domains_are_different() {
    let mut rig = Rig::attached();
    rig.all_ok([attach(2, 2)]);
    let first = rig.add_chunk(1, APERTURE);
    let second = rig.add_chunk(2, APERTURE);
    assert_ne!(first, second);
    let host = |id| rig.mapper(id).translate(APERTURE).expect("it is mapped").0;
    assert_ne!(host(1), host(2));
}

#[test]
fn window_del_releases_the_chunk() {
    let mut rig = Rig::attached();
    rig.all_ok([attach(2, 1)]);
    rig.add_chunk(1, APERTURE);
    rig.add_chunk(1, APERTURE + CHUNK);
    rig.all_ok([window_del(1, APERTURE)]);
    assert_eq!(rig.chunks.backed(), 1);
    assert_eq!(rig.mapper(1).mappings().len(), 1);
    assert_eq!(rig.mapper(2).mappings().len(), 1);
    assert_eq!(rig.engine.counters().window_bytes, CHUNK);
    assert_eq!(rig.engine.counters().peak_window_bytes, 2 * CHUNK);
    rig.add_chunk(1, APERTURE);
}

#[test]
fn unknown_domain_is_no_entry() {
    let mut rig = Rig::attached();
    assert_eq!(rig.status(&window_add(2, BOTH, APERTURE)), NOENT);
    assert_eq!(rig.status(&window_del(2, APERTURE)), NOENT);
}

#[test]
fn window_del_of_an_unknown_chunk_is_no_entry() {
    let mut rig = Rig::attached();
    rig.add_chunk(1, APERTURE);
    assert_eq!(rig.status(&window_del(1, APERTURE + CHUNK)), NOENT);
    rig.all_ok([window_del(1, APERTURE)]);
    assert_eq!(rig.status(&window_del(1, APERTURE)), NOENT);
}

#[test]
fn iova_that_is_unaligned_or_outside_is_out_of_range() {
    let mut rig = Rig::attached();
    rig.add_chunk(1, APERTURE);
    let end = APERTURE + APERTURE_CHUNKS * CHUNK;
    for iova in [APERTURE + 1, APERTURE + CHUNK / 2, APERTURE - CHUNK, end, 0, u64::MAX] {
        assert_eq!(rig.status(&window_add(1, BOTH, iova)), RANGE, "{iova:#x}");
        assert_eq!(rig.status(&window_del(1, iova)), RANGE, "{iova:#x}");
    }
    rig.add_chunk(1, end - CHUNK);
}

#[test]
fn reserved_fields_and_flags_are_invalid() {
    let mut rig = Rig::attached();
    for flags in [0, 4, 7, 1 << 31 | READ] {
        assert_eq!(rig.status(&window_add(1, flags, APERTURE)), INVAL);
    }
    for at in [20, 27] {
        let mut request = window_add(1, BOTH, APERTURE);
        request[at] = 1;
        assert_eq!(rig.status(&request), INVAL, "byte {at}");
    }
    rig.add_chunk(1, APERTURE);
    for at in [16, 19, 20, 27] {
        let mut request = window_del(1, APERTURE);
        request[at] = 1;
        assert_eq!(rig.status(&request), INVAL, "byte {at}");
    }
    assert_eq!(rig.chunks.backed(), 1);
}

#[test]
fn window_add_at_an_existing_chunk_is_invalid() {
    let mut rig = Rig::attached();
    rig.add_chunk(1, APERTURE);
    assert_eq!(rig.status(&window_add(1, BOTH, APERTURE)), INVAL);
    assert_eq!(rig.chunks.backed(), 1);
}

#[test]
fn budget_applies_to_all_domains_together() {
    let mut rig = Rig::attached();
    rig.all_ok([attach(2, 2)]);
    for place in 0..BUDGET_CHUNKS / 2 {
        rig.add_chunk(1, APERTURE + place * CHUNK);
        rig.add_chunk(2, APERTURE + place * CHUNK);
    }
    let more = window_add(1, BOTH, APERTURE + 9 * CHUNK);
    assert_eq!(rig.status(&more), NOMEM);
    assert_eq!(u64::from(rig.chunks.peak()), BUDGET_CHUNKS);
    rig.all_ok([window_del(2, APERTURE), more]);
}

#[test]
fn lowered_budget_keeps_chunks_but_backs_no_more() {
    let mut rig = Rig::attached();
    rig.add_chunk(1, APERTURE);
    rig.add_chunk(1, APERTURE + CHUNK);
    assert!(rig.engine.set_budget(CHUNK).expect("it fits"));
    assert_eq!(rig.mapper(1).mappings().len(), 2);
    let more = window_add(1, BOTH, APERTURE + 2 * CHUNK);
    assert_eq!(rig.status(&more), NOMEM);
    rig.all_ok([window_del(1, APERTURE)]);
    assert_eq!(rig.status(&more), NOMEM);
    rig.all_ok([window_del(1, APERTURE + CHUNK), more]);
}

#[test]
fn raised_budget_allows_chunks_up_to_the_region_size() {
    let mut rig = Rig::attached();
    let region = u64::from(REGION_CHUNKS) * CHUNK;
    let error = rig.engine.set_budget(region + 1).expect_err("it is too large");
    assert!(error.to_string().contains("the size of the shared region"));
    assert!(rig.engine.set_budget(region).expect("it fits"));
    for place in 0..u64::from(REGION_CHUNKS) {
        rig.add_chunk(1, APERTURE + place * CHUNK);
    }
    let more = window_add(1, BOTH, APERTURE + 9 * CHUNK);
    assert_eq!(rig.status(&more), NOMEM);
}

#[test]
fn budget_below_one_chunk_backs_none() {
    let mut rig = Rig::attached();
    rig.engine.set_budget(CHUNK - 1).expect("it fits");
    assert_eq!(rig.status(&window_add(1, BOTH, APERTURE)), NOMEM);
}

#[test]
fn config_change_is_notified_only_if_changed_and_negotiated() {
    let mut rig = Rig::new();
    assert!(!rig.engine.set_budget(BUDGET_CHUNKS * CHUNK).expect("it fits"));
    assert!(rig.engine.set_threshold(1).expect("there are windows"));
    assert!(!rig.engine.set_threshold(1).expect("there are windows"));
    assert!(rig.engine.set_threshold_write(2).expect("there are windows"));
    assert!(!rig.engine.set_threshold_write(2).expect("there are windows"));
    assert_eq!(rig.engine.config_space()[72..80], [1, 0, 0, 0, 2, 0, 0, 0]);
    assert_eq!((rig.engine.threshold(), rig.engine.threshold_write()), (1, 2));
    let mut standard = Rig::standard();
    assert!(!standard.engine.set_budget(CHUNK).expect("it fits"));
    assert!(!standard.engine.set_threshold(1).expect("there are windows"));
    assert!(!standard.engine.set_threshold_write(2).expect("there are windows"));
    let space = standard.engine.config_space();
    assert_eq!(space[64..72], CHUNK.to_le_bytes(), "it has changed anyway");
}

#[test]
fn without_the_feature_requests_are_unknown() {
    let mut rig = Rig::standard();
    rig.all_ok([attach(1, 1)]);
    assert!(rig.is_unknown(&window_add(1, BOTH, APERTURE)));
    assert!(rig.is_unknown(&window_del(1, APERTURE)));
    assert_eq!(rig.chunks.backed(), 0);
}

#[test]
fn chunks_do_not_count_as_mappings() {
    let mut config = engine_config();
    config.limits.max_mappings = 1;
    let mut rig = Rig::with_config(config);
    rig.all_ok([attach(1, 1)]);
    rig.add_chunk(1, APERTURE);
    rig.all_ok([map(1, 0, 0xfff, 0, READ)]);
    rig.add_chunk(1, APERTURE + CHUNK);
}

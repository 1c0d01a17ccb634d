// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of mappings on a host whose calls are slow.

use std::time::Duration;

use super::*;
use crate::test_utils::*;
use crate::{EngineConfig, Limits, MapperLimits};

/// Number of mappings that exceeds the limit for a slow host.
const MANY: u64 = 5000;

/// Returns an engine with endpoint 1 in domain 1. Each map call of the endpoint's mapper takes `call`.
fn rig(call: Duration, max_unmap_time: Duration) -> Rig {
    let mut rig =
        Rig::with_config(EngineConfig { limits: Limits { max_unmap_time, ..Limits::default() }, ..engine_config() });
    rig.all_ok([attach(1, 1)]);
    rig.mapper(1).delay(call);
    rig
}

/// Maps pages with gaps between them until a MAP is rejected. Returns the number of mapped pages.
fn fill(rig: &mut Rig, domain: u32) -> u64 {
    let one = |page: &u64| (page * 2 * PAGE, page * 2 * PAGE + PAGE - 1);
    let outcomes = (0..MANY).map(|page| {
        let (first, last) = one(&page);
        rig.status(&map(domain, first, last, 0, READ))
    });
    outcomes.take_while(|status| *status == OK).count() as u64
}

#[test]
#[cfg_attr(miri, ignore = "thousands of mappings take Miri minutes")]
fn gapped_mappings_stay_within_the_detach_time_limit() {
    let mut slow = rig(Duration::from_micros(20), Duration::from_millis(20));
    let mapped = fill(&mut slow, 1);
    // A call takes at least 20 µs, so unmapping more than 1000 mappings exceeds the limit of 20 ms. But the engine always allows 4096
    // mappings.
    assert_eq!(mapped, 4096);
    let before = slow.engine.counters();
    slow.all_ok([detach(1, 1)]);
    let after = slow.engine.counters();
    assert_eq!((after.host_unmaps - before.host_unmaps, after.mappings), (4096, 0));
    // The DETACH removed all mappings, so new mappings are allowed again.
    slow.mapper(1).delay(Duration::ZERO);
    slow.all_ok([attach(1, 1), map(1, 0, PAGE - 1, 0, READ)]);
}

#[test]
#[cfg_attr(miri, ignore = "thousands of mappings take Miri minutes")]
fn fast_host_is_not_limited() {
    let mut fast = rig(Duration::ZERO, Duration::from_secs(3));
    assert_eq!(fill(&mut fast, 1), MANY);
}

#[test]
#[cfg_attr(miri, ignore = "thousands of mappings take Miri minutes")]
fn mappings_count_once_per_address_space_in_the_domain() {
    let mut slow = rig(Duration::from_micros(20), Duration::from_millis(20));
    assert_eq!(fill(&mut slow, 1), 4096);
    assert_eq!(slow.status(&attach(2, 1)), NOMEM);
    // Remove half of the mappings. The other 2048 mappings then count once for each of the two endpoints, which makes exactly the allowed
    // 4096.
    let half = 2048 * 2 * PAGE;
    slow.all_ok([unmap(1, half, 2 * half - 1), attach(2, 1)]);
    assert_eq!(slow.status(&map(1, half, half + PAGE - 1, 0, READ)), NOMEM);
}

#[test]
#[cfg_attr(miri, ignore = "thousands of mappings take Miri minutes")]
fn fast_calls_of_one_endpoint_do_not_raise_anothers_limit() {
    let mut slow = rig(Duration::from_micros(20), Duration::from_millis(20));
    slow.all_ok([attach(2, 2)]);
    for _ in 0..200_000 {
        slow.all_ok([map(2, 0, PAGE - 1, 0, READ), unmap(2, 0, PAGE - 1)]);
    }
    assert_eq!(fill(&mut slow, 1), 4096);
}

#[test]
#[cfg_attr(miri, ignore = "thousands of mappings take Miri minutes")]
fn failed_calls_do_not_count_as_fast() {
    let mut slow = rig(Duration::ZERO, Duration::from_millis(20));
    for _ in 0..5000 {
        slow.mapper(1).exhaust_map(0);
        assert_eq!(slow.status(&map(1, 0, PAGE - 1, 0, READ)), NOMEM);
    }
    let (timed, failed) = (slow.engine.report().host.map.count, slow.engine.counters().host_errors);
    assert_eq!((timed, failed), (5000, 5000), "each call is timed until one succeeds");
    slow.mapper(1).delay(Duration::from_micros(20));
    assert_eq!(fill(&mut slow, 1), 4096);
}

#[test]
#[cfg_attr(miri, ignore = "thousands of mappings take Miri minutes")]
fn bypass_calls_do_not_count_as_slow() {
    let max_unmap_time = Duration::from_millis(100);
    let limits = Limits { max_unmap_time, max_step: CHUNK, ..Limits::default() };
    let mut rig = Rig::with_config(EngineConfig { limits, ..engine_config() });
    rig.all_ok([attach(2, 2)]);
    assert_eq!(fill(&mut rig, 2), MANY, "more than is always allowed");
    rig.mapper(1).delay(Duration::from_millis(2));
    rig.all_ok([attach_bypass(1, 1)]);
    assert!(!rig.mapper(1).is_empty());
    rig.mapper(1).delay(Duration::ZERO);
    rig.all_ok([attach(1, 3)]);
    for page in 0..100 {
        rig.all_ok([map(3, page * 2 * PAGE, page * 2 * PAGE + PAGE - 1, 0, READ)]);
    }
}

#[test]
#[cfg_attr(miri, ignore = "thousands of mappings take Miri minutes")]
fn host_with_untimed_calls_is_not_assumed_fast() {
    let mut mixed = rig(Duration::from_micros(100), Duration::from_millis(100));
    mixed.all_ok([attach(2, 2)]);
    assert_eq!(fill(&mut mixed, 2), MANY);
    let before = mixed.engine.counters();
    assert_eq!(mixed.status(&attach(1, 2)), NOMEM);
    let after = mixed.engine.counters();
    assert_eq!((after.mappings, after.mapped_bytes), (before.mappings, before.mapped_bytes));
    assert!(mixed.mapper(1).is_empty());
    assert_eq!(mixed.engine.report().endpoints[0].domain, Some(1), "it stays in its domain");
    // The first attempt measured the duration of a call. So the second attempt fails before the engine maps anything.
    assert_eq!((mixed.status(&attach(1, 2)), mixed.engine.counters().host_maps), (NOMEM, after.host_maps));
}

#[test]
#[cfg_attr(miri, ignore = "thousands of mappings take Miri minutes")]
fn regular_failures_do_not_hide_slow_calls() {
    let mut slow = rig(Duration::from_micros(20), Duration::from_millis(20));
    let mut mapped = 0;
    for page in 0..MANY {
        if page % 7 == 0 {
            slow.mapper(1).exhaust_map(0);
            assert_eq!(slow.status(&map(1, 1 << 40, (1 << 40) + PAGE - 1, 0, READ)), NOMEM);
        }
        mapped += u64::from(slow.status(&map(1, page * 2 * PAGE, page * 2 * PAGE + PAGE - 1, 0, READ)) == OK);
    }
    assert_eq!(mapped, 4096);
}

#[test]
#[cfg_attr(miri, ignore = "thousands of mappings take Miri minutes")]
fn slow_endpoint_does_not_limit_mappings_of_a_fast_one() {
    let limits = Limits { max_unmap_time: Duration::from_millis(200), max_mappings: 10_000, ..Limits::default() };
    let mut rig = Rig::with_config(EngineConfig { limits, ..engine_config() });
    rig.all_ok([attach(1, 1), attach(2, 2)]);
    rig.mapper(1).delay(Duration::from_millis(4));
    for page in 0..100 {
        rig.all_ok([map(1, page * 2 * PAGE, page * 2 * PAGE + PAGE - 1, 0, READ)]);
    }
    assert_eq!(fill(&mut rig, 2), MANY);
    assert_eq!(rig.status(&map(1, 1 << 40, (1 << 40) + PAGE - 1, 0, READ)), NOMEM);
}

#[test]
#[cfg_attr(miri, ignore = "thousands of mappings take Miri minutes")]
fn moving_endpoint_is_refused_until_its_host_calls_are_timed() {
    let mut rig = rig(Duration::ZERO, Duration::from_millis(100));
    let group = TestGroup::default();
    let limits = MapperLimits { page_size_mask: !0xfff, iova_ranges: vec![0..=u64::MAX], max_mappings: None };
    for id in [11, 12] {
        let mapper = group.mapper(id, limits.clone());
        rig.chunks.watch(mapper.probe());
        rig.engine.add_endpoint(id, Box::new(mapper)).unwrap();
    }
    rig.all_ok([attach(2, 2), attach(11, 3), attach(12, 3)]);
    assert_eq!(fill(&mut rig, 2), MANY);
    assert_eq!(rig.status(&attach(11, 2)), NOMEM, "the duration of its calls is unknown");
    for page in 0..200 {
        rig.all_ok([map(3, page * 2 * PAGE, page * 2 * PAGE + PAGE - 1, 0, READ)]);
    }
    rig.all_ok([attach(11, 2)]);
}

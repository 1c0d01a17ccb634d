// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of endpoints that share a host address space.

use super::*;
use crate::MapperLimits;
use crate::test_utils::*;

fn limits() -> MapperLimits {
    MapperLimits { page_size_mask: !0xfff, iova_ranges: vec![0..=0xfedf_ffff], max_mappings: None }
}

/// Returns a rig with endpoints 1 to 3, which are bound to their address spaces, and endpoints 11 to 13, which the host can move.
fn movable() -> (Rig, TestGroup) {
    let mut rig = Rig::new();
    let group = TestGroup::default();
    for id in 11..=13 {
        let mapper = group.mapper(id, limits());
        rig.chunks.watch(mapper.probe());
        rig.mappers.insert(id, mapper.probe());
        rig.engine.add_endpoint(id, Box::new(mapper)).expect("it is valid");
    }
    (rig, group)
}

fn reaches(group: &TestGroup, id: u32, iova: u64) -> bool {
    group.mapper_of(id).translate(iova).is_some()
}

#[test]
fn mapping_takes_one_call_for_all_sharing_endpoints() {
    let (mut rig, group) = movable();
    rig.all_ok([attach(11, 1), attach(12, 1), map(1, 0, 0xfff, 0, READ), attach(13, 1)]);
    rig.add_chunk(1, APERTURE);
    let counters = rig.engine.counters();
    assert_eq!((counters.host_maps, counters.mapped_bytes), (2, 0x1000));
    assert!((11..=13).all(|id| reaches(&group, id, 0) && reaches(&group, id, APERTURE)));
    rig.all_ok([window_del(1, APERTURE), unmap(1, 0, 0xfff)]);
    assert_eq!(rig.engine.counters().host_unmaps, 2);
    rig.assert_host_is_clean();
}

#[test]
fn bound_and_movable_endpoints_have_the_same_mappings() {
    let (mut rig, group) = movable();
    rig.all_ok([attach(1, 1), attach(11, 1), map(1, 0, 0xfff, 0, READ), attach(2, 1), attach(12, 1)]);
    assert_eq!(rig.engine.counters().host_maps, 3, "1, 2, and 11 with 12");
    for id in [11, 12] {
        assert_eq!(group.mapper_of(id).mappings(), rig.mapper(1).mappings());
    }
    rig.all_ok([detach(1, 1), detach(11, 1)]);
    assert!(!reaches(&group, 11, 0) && reaches(&group, 12, 0) && rig.mapper(1).is_empty());
    rig.all_ok([detach(12, 1), detach(2, 1)]);
    rig.assert_host_is_clean();
}

#[test]
fn departed_endpoint_keeps_no_mappings_of_its_old_domain() {
    let (mut rig, group) = movable();
    rig.all_ok([attach(11, 1), attach(12, 1), map(1, 0, 0xfff, 0, READ), detach(11, 1)]);
    assert!(!reaches(&group, 11, 0) && reaches(&group, 12, 0));
    rig.all_ok([attach(11, 2), map(2, 0x1000, 0x1fff, 0, READ), attach(13, 2)]);
    assert!(reaches(&group, 11, 0x1000) && !reaches(&group, 11, 0));
    assert!(reaches(&group, 12, 0) && !reaches(&group, 12, 0x1000));
    // Endpoint 11 moves from one shared address space to another.
    rig.all_ok([attach(13, 1), attach(11, 1)]);
    assert!((11..=13).all(|id| reaches(&group, id, 0) && !reaches(&group, id, 0x1000)));
    assert_eq!(rig.status(&map(2, 0, 0xfff, 0, READ)), NOENT);
    assert_eq!(rig.engine.counters().mapped_bytes, 0x1000);
}

#[test]
fn endpoint_moved_to_populated_domain_has_only_its_mappings() {
    let (mut rig, group) = movable();
    rig.all_ok([attach(11, 1), attach(12, 1), map(1, 0, 0xfff, 0, READ)]);
    rig.all_ok([attach(1, 2), map(2, 0x5000, 0x5fff, 0, READ), attach(12, 2)]);
    assert!(reaches(&group, 12, 0x5000) && !reaches(&group, 12, 0));
    assert!(reaches(&group, 11, 0) && !reaches(&group, 11, 0x5000));
}

#[test]
fn move_that_the_host_refuses_changes_nothing() {
    let (mut rig, group) = movable();
    rig.all_ok([
        attach(11, 1),
        attach(12, 1),
        attach(13, 2),
        map(1, 0, 0xfff, 0, READ),
        map(2, 0x1000, 0x1fff, 0, READ),
    ]);
    rig.all_ok([attach(1, 3), map(3, 0x7000, 0x7fff, 0, READ)]);
    let requests = [attach(13, 1), attach(12, 2), attach(12, 3), attach(12, 4), detach(11, 1)];
    for request in requests {
        let before = rig.engine.counters();
        group.fail_adopt(0);
        assert_eq!(rig.status(&request), DEVERR, "{request:x?}");
        assert!(reaches(&group, 11, 0) && reaches(&group, 12, 0) && reaches(&group, 13, 0x1000));
        assert!(!reaches(&group, 12, 0x7000));
        let after = rig.engine.counters();
        assert_eq!((before.mappings, before.mapped_bytes), (after.mappings, after.mapped_bytes));
        assert_eq!(after.stuck_ranges, 0);
    }
    rig.all_ok([detach(11, 1), attach(12, 2), detach(13, 2), detach(12, 2), detach(1, 3)]);
    rig.assert_host_is_clean();
}

#[test]
fn endpoint_does_not_move_to_a_stuck_address_space() {
    let (mut rig, group) = movable();
    rig.all_ok([attach(11, 1), map(1, 0, 0xfff, 0, READ), attach(12, 2)]);
    let own = group.mapper_of(11);
    own.refuse_unmaps(true);
    // Endpoint 11 moves to the address space of endpoint 12. The range that endpoint 11 leaves behind is stuck in a spare address space.
    rig.all_ok([attach(11, 2)]);
    assert_eq!(rig.engine.counters().stuck_ranges, 1);
    assert!(group.mapper_of(11).is(&group.mapper_of(12)));
    assert_eq!(rig.status(&detach(11, 2)), DEVERR);
    assert!(!reaches(&group, 11, 0));
    own.heal();
    rig.all_ok([detach(11, 2), detach(12, 2)]);
    rig.assert_host_is_clean();
}

#[test]
fn attach_after_reset_separates_sharing_endpoints() {
    let (mut rig, group) = movable();
    rig.all_ok([attach(11, 1), attach(12, 1), attach(13, 1), map(1, 0, 0xfff, 0, READ)]);
    rig.assert_reset_cleans_host();
    rig.engine.accept_features(u64::MAX);
    rig.all_ok([attach(11, 1), attach(12, 2), attach(13, 3), map(1, 0, 0xfff, 0, READ)]);
    assert!(reaches(&group, 11, 0) && !reaches(&group, 12, 0) && !reaches(&group, 13, 0));
}

#[test]
fn removing_an_endpoint_keeps_mappings_of_the_others() {
    let (mut rig, group) = movable();
    rig.all_ok([attach(11, 1), attach(12, 1), map(1, 0, 0xfff, 0, READ)]);
    let spare = rig.engine.remove_endpoint(11).expect("it exists");
    assert!(reaches(&group, 12, 0));
    drop(spare);
    rig.all_ok([map(1, 0x1000, 0x1fff, 0, READ), attach(13, 1), detach(12, 1)]);
    rig.engine.remove_endpoint(13).expect("it exists");
    rig.engine.remove_endpoint(12).expect("it exists");
    rig.assert_host_is_clean();
}

#[test]
fn endpoint_that_cannot_map_the_domain_does_not_join() {
    let (mut rig, group) = movable();
    let mapper = group.mapper(14, MapperLimits { iova_ranges: vec![0x10_0000..=0xfedf_ffff], ..limits() });
    rig.engine.add_endpoint(14, Box::new(mapper)).expect("it is valid");
    rig.all_ok([attach(11, 1), map(1, 0x1000, 0x1fff, 0, READ)]);
    assert_eq!(rig.status(&attach(14, 1)), UNSUPP);
    rig.all_ok([unmap(1, 0x1000, 0x1fff), attach(14, 1)]);
    assert_eq!(rig.status(&map(1, 0x1000, 0x1fff, 0, READ)), RANGE);
    assert!(group.mapper_of(11).is_empty());
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of MAP_LIST.

use super::*;
use crate::spec::{MAX_MAP_RANGES, feature};
use crate::test_utils::*;

#[test]
fn map_list_maps_its_ranges_one_after_the_other() {
    let mut rig = Rig::attached();
    rig.all_ok([map_list(1, 0x10_0000, READ, &[(0x5000, PAGE), (0x2000, 2 * PAGE), (0x9000, PAGE)])]);
    for (iova, gpa) in [(0x10_0123, 0x5123), (0x10_1123, 0x2123), (0x10_2123, 0x3123), (0x10_3123, 0x9123)] {
        let expected = (rig.ram.host_address(gpa), crate::Permissions::READ);
        assert_eq!(rig.mapper(1).translate(iova), Some(expected), "{iova:#x}");
    }
    assert_eq!(rig.mapper(1).translate(0x10_4000), None);
    let counters = rig.engine.counters();
    assert_eq!((counters.requests.map_list, counters.requests.map, counters.mappings), (1, 0, 3));
    assert_eq!(counters.mapped_bytes, 4 * PAGE);
}

#[test]
fn map_list_serves_every_endpoint_of_the_domain() {
    let mut rig = Rig::attached();
    rig.all_ok([attach(2, 1), map_list(1, 0, BOTH, &[(0, PAGE), (0x4000, PAGE)]), attach(3, 1)]);
    assert_eq!(rig.mapper(1).mappings(), rig.mapper(2).mappings());
    assert_eq!(rig.mapper(1).mappings(), rig.mapper(3).mappings());
}

#[test]
fn unmap_removes_one_range_of_a_list_or_all() {
    let mut rig = Rig::attached();
    rig.all_ok([map_list(1, 0, BOTH, &[(0, PAGE), (0x4000, 2 * PAGE), (0x8000, PAGE)])]);
    assert_eq!(rig.status(&unmap(1, 0, 0x1fff)), RANGE, "it splits the second range");
    rig.all_ok([unmap(1, 0, 0xfff)]);
    assert_eq!(rig.engine.counters().mappings, 2);
    rig.all_ok([unmap(1, 0, 0xffff)]);
    assert!(rig.mapper(1).is_empty());
    assert_eq!(rig.engine.counters().mappings, 0);
}

#[test]
fn map_list_needs_one_to_256_ranges() {
    let mut rig = Rig::attached();
    assert_eq!(rig.status(&map_list(1, 0, BOTH, &[])), INVAL);
    let ranges = vec![(0x1000, PAGE); MAX_MAP_RANGES + 1];
    assert_eq!(rig.status(&map_list(1, 0, BOTH, &ranges)), INVAL);
    assert!(rig.mapper(1).is_empty());
    rig.all_ok([map_list(1, 0, BOTH, &ranges[1..]), unmap(1, 0, 0xf_ffff)]);
    rig.all_ok([map_list(1, 0, BOTH, &ranges[..1])]);
}

#[test]
fn map_list_that_is_shorter_than_its_count_is_invalid() {
    let mut rig = Rig::attached();
    let mut request = map_list(1, 0, BOTH, &[(0, PAGE), (0x4000, PAGE)]);
    request.truncate(request.len() - 1);
    assert_eq!(rig.status(&request), INVAL);
    request[20..24].copy_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(rig.status(&request), INVAL);
    assert_eq!(rig.engine.counters().requests.invalid, 2);
    assert!(rig.mapper(1).is_empty());
}

#[test]
fn failed_map_list_maps_nothing_and_gets_the_status_of_the_range() {
    let mut rig = Rig::attached();
    rig.all_ok([map(1, 0x2000, 0x2fff, 0, READ)]);
    let good = (0x5000, PAGE);
    let beyond = !0xfff;
    for (start, flags, bad, status) in [
        (0, BOTH, (0x6000, 0), INVAL),
        (0, BOTH, (0x6000, 0x800), RANGE),
        (0, BOTH, (0x6080, PAGE), RANGE),
        (0, BOTH, (0x6000, u64::MAX), INVAL),
        (0, BOTH, (beyond, 2 * PAGE), INVAL),
        (0, BOTH, (0x5000_0000, PAGE), INVAL),
        (0x1000, BOTH, (0x6000, PAGE), INVAL),
        (0, BOTH, (0x6000, 2 * PAGE), INVAL),
        (0, 0, (0x6000, PAGE), INVAL),
        (0, 0x80, (0x6000, PAGE), INVAL),
        (APERTURE - PAGE, BOTH, (0x6000, PAGE), RANGE),
        (beyond, BOTH, (0x6000, PAGE), RANGE),
    ] {
        let before = rig.mapper(1).mappings();
        assert_eq!(rig.status(&map_list(1, start, flags, &[good, bad])), status, "{start:#x} {flags} {bad:x?}");
        assert_eq!(rig.mapper(1).mappings(), before, "{bad:x?}");
        assert_eq!(rig.engine.counters().mappings, 1, "{bad:x?}");
    }
    assert_eq!(rig.status(&map_list(9, 0, BOTH, &[good])), NOENT);
    rig.all_ok([unmap(1, 0x2000, 0x2fff), map_list(1, 0, BOTH, &[good, (0x6000, 2 * PAGE)])]);
}

#[test]
fn host_failure_in_a_map_list_is_undone_in_every_endpoint() {
    let mut rig = Rig::attached();
    rig.all_ok([attach(2, 1), map(1, 0x3000, 0x3fff, 0x1000, READ)]);
    let list = map_list(1, 0, BOTH, &[(0, PAGE), (0x4000, PAGE), (0x8000, PAGE)]);
    for after in 0..3 {
        rig.mapper(2).fail_map(after);
        assert_eq!(rig.status(&list), DEVERR, "{after}");
        assert_eq!(rig.mapper(1).mappings().len(), 1, "{after}");
        assert_eq!(rig.mapper(1).mappings(), rig.mapper(2).mappings());
        assert_eq!(rig.engine.counters().mappings, 1);
    }
    rig.all_ok([list, unmap(1, 0, 0x3fff)]);
    assert!(rig.mapper(1).is_empty() && rig.mapper(2).is_empty());
}

#[test]
fn undone_range_that_the_host_keeps_is_stuck() {
    let mut rig = Rig::attached();
    rig.mapper(1).fail_map(1);
    rig.mapper(1).refuse_unmaps(true);
    let list = map_list(1, 0, BOTH, &[(0, PAGE), (0x4000, PAGE)]);
    assert_eq!(rig.status(&list), DEVERR);
    assert_eq!(rig.engine.counters().stuck_ranges, 1);
    assert_eq!(rig.engine.counters().mappings, 0);
    rig.mapper(1).refuse_unmaps(false);
    rig.all_ok([list]);
    assert_eq!(rig.engine.counters().stuck_ranges, 0);
}

#[test]
fn map_list_is_not_answered_unless_its_feature_is_accepted() {
    let mut rig = Rig::without(feature::MAP_LIST);
    rig.all_ok([attach(1, 1)]);
    assert!(rig.is_unknown(&map_list(1, 0, BOTH, &[(0, PAGE)])));
    assert!(rig.mapper(1).is_empty());
}

#[test]
fn map_list_without_map_and_unmap_is_not_supported() {
    let mut rig = Rig::without(feature::MAP_UNMAP);
    rig.all_ok([attach(1, 1)]);
    assert_eq!(rig.status(&map_list(1, 0, BOTH, &[(0, PAGE)])), UNSUPP);
}

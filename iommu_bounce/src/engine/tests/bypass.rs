// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of bypass: bypass domains and unattached endpoints.

use std::time::Duration;

use super::*;
use crate::test_utils::*;
use crate::{ConfigError, MapperLimits};

/// Checks that the host maps exactly all RAM for `id`, with IOVA equal to GPA.
fn assert_all_ram(rig: &Rig, id: u32) {
    let mappings = rig.mapper(id).mappings();
    let regions: Vec<_> = mappings.iter().map(|(iova, mapping)| (*iova, mapping.len)).collect();
    assert_eq!(regions, [(0, SECOND_REGION), (SECOND_REGION, 0x10_0000), (1 << 32, 0x10_0000)], "endpoint {id}");
    for (iova, mapping) in mappings {
        assert_eq!(mapping.host_address, rig.ram.host_address(iova));
        assert_eq!(mapping.permissions.bits(), BOTH);
    }
}

fn bypass_of(rig: &Rig) -> u8 {
    rig.engine.config_space()[36]
}

#[test]
fn endpoint_accesses_all_ram_only_in_the_bypass_domain() {
    let mut rig = Rig::new();
    rig.all_ok([attach_bypass(1, 1), attach_bypass(2, 1)]);
    assert_all_ram(&rig, 1);
    assert_all_ram(&rig, 2);
    assert_eq!(rig.engine.counters().mappings, 0, "the driver made none");
    rig.all_ok([detach(1, 1)]);
    assert!(rig.mapper(1).is_empty());
    rig.all_ok([attach(2, 2), map(2, 0, 0xfff, 0, READ)]);
    assert_eq!(rig.mapper(2).mappings().len(), 1);
    rig.assert_reset_cleans_host();
}

#[test]
fn bypass_domain_takes_no_mappings_and_no_windows() {
    let mut rig = Rig::new();
    rig.all_ok([attach_bypass(1, 1)]);
    assert_eq!(rig.status(&map(1, 0x60_0000, 0x60_0fff, 0, READ)), INVAL);
    assert_eq!(rig.status(&unmap(1, 0, SECOND_REGION - 1)), INVAL);
    let reply = rig.send(&window_add(1, BOTH, APERTURE));
    assert_eq!(reply[8], INVAL);
    assert_eq!(rig.status(&window_del(1, APERTURE)), NOENT);
    assert_all_ram(&rig, 1);
}

#[test]
fn bypass_flag_that_differs_from_the_domain_is_invalid() {
    let mut rig = Rig::new();
    rig.all_ok([attach_bypass(1, 1), attach(2, 2)]);
    for request in [attach(1, 1), attach(3, 1), attach_bypass(2, 2), attach_bypass(3, 2)] {
        assert_eq!(rig.status(&request), INVAL, "{request:x?}");
    }
    assert!(rig.mapper(3).is_empty());
}

#[test]
fn bypass_flag_is_unknown_without_the_feature() {
    let mut rig = Rig::new();
    rig.engine.accept_features(!feature::BYPASS_CONFIG);
    assert_eq!(rig.status(&attach_bypass(1, 1)), INVAL);
    rig.engine.write_bypass(1);
    assert_eq!(bypass_of(&rig), 0);
    rig.assert_host_is_clean();
}

#[test]
fn slow_bypass_can_be_turned_off_but_not_on_again_at_once() {
    let mut rig = Rig::new();
    rig.mapper(1).delay(Duration::from_millis(200));
    rig.engine.write_bypass(1);
    assert_eq!(bypass_of(&rig), 1);
    rig.engine.write_bypass(0);
    assert_eq!(bypass_of(&rig), 0);
    rig.assert_host_is_clean();
    rig.engine.write_bypass(1);
    assert_eq!(bypass_of(&rig), 0, "toggling it would block all other users of the engine");
    rig.assert_host_is_clean();
}

#[test]
fn failed_attach_to_a_bypass_domain_leaves_no_domain() {
    let mut rig = Rig::new();
    rig.all_ok([attach(1, 1), map(1, 0, 0xfff, 0, READ)]);
    rig.mapper(1).exhaust_map(1);
    assert_eq!(rig.status(&attach_bypass(1, 2)), NOMEM);
    assert_eq!(rig.mapper(1).mappings().len(), 1);
    rig.all_ok([attach(2, 2)]);
}

#[test]
fn endpoint_that_cannot_map_all_ram_is_unsupported() {
    let mut rig = Rig::new();
    let mapper = RecordingMapper::with_ranges(vec![0..=0x3f_ffff, 0x41_0000..=0xfedf_ffff]);
    let narrow = mapper.probe();
    rig.engine.add_endpoint(4, Box::new(mapper)).expect("it is valid");
    assert_eq!(rig.status(&attach_bypass(4, 1)), UNSUPP);
    rig.engine.write_bypass(1);
    assert_eq!(bypass_of(&rig), 0, "the field stays");
    assert!(narrow.is_empty());
    rig.assert_host_is_clean();
}

#[test]
fn bypass_field_affects_unattached_endpoints() {
    let mut rig = Rig::new();
    rig.all_ok([attach(1, 1), map(1, 0, 0xfff, 0, READ)]);
    rig.engine.write_bypass(1);
    // Clear the cooldown, because under Miri every mapping counts as slow. Other tests do this for the same reason.
    rig.engine.bypass_rests = None;
    assert_eq!(bypass_of(&rig), 1);
    assert_all_ram(&rig, 2);
    assert_all_ram(&rig, 3);
    assert_eq!(rig.mapper(1).mappings().len(), 1);
    rig.all_ok([detach(1, 1), attach(2, 2)]);
    assert_all_ram(&rig, 1);
    assert!(rig.mapper(2).is_empty());
    rig.engine.write_bypass(2);
    assert_eq!(bypass_of(&rig), 1, "2 is not a valid value");
    rig.engine.write_bypass(0);
    rig.assert_host_is_clean();
}

#[test]
fn bypass_field_survives_a_device_reset_but_no_vm_reset() {
    let mut rig = Rig::new();
    rig.engine.write_bypass(1);
    rig.engine.bypass_rests = None;
    rig.all_ok([attach(1, 1)]);
    rig.engine.reset();
    assert_eq!(bypass_of(&rig), 1);
    assert_all_ram(&rig, 1);
    rig.engine.system_reset();
    assert_eq!(bypass_of(&rig), 0);
    rig.assert_host_is_clean();
}

#[test]
fn bypass_field_can_start_at_one() {
    let mut rig = Rig::with_config(EngineConfig { bypass: true, ..engine_config() });
    rig.engine.accept_features(0);
    assert_all_ram(&rig, 1);
    rig.all_ok([attach(1, 1)]);
    assert!(rig.mapper(1).is_empty());
    rig.engine.system_reset();
    assert_all_ram(&rig, 1);
    let limits = MapperLimits { page_size_mask: 0x1000, iova_ranges: vec![0..=u64::MAX], max_mappings: Some(1) };
    let added = rig.engine.add_endpoint(4, Box::new(RecordingMapper::with_limits(limits)));
    let error = added.expect_err("RAM has three regions").to_string();
    assert!(error.contains("endpoint 0x4: bypass is on"), "{error}");
    rig.engine.remove_endpoint(1).expect("it exists");
    assert!(rig.mapper(1).is_empty());
}

#[test]
fn bypass_field_stays_0_if_the_host_cannot_map_ram() {
    let mut rig = Rig::new();
    rig.mapper(3).exhaust_map(2);
    rig.engine.write_bypass(1);
    assert_eq!(bypass_of(&rig), 0);
    rig.assert_host_is_clean();
    // Clear the cooldown, because under Miri every mapping counts as slow.
    rig.engine.bypass_rests = None;
    rig.engine.write_bypass(1);
    assert_eq!(bypass_of(&rig), 1);
}

#[test]
fn detach_gives_no_access_if_bypass_cannot_map_ram() {
    let mut rig = Rig::new();
    rig.engine.write_bypass(1);
    rig.engine.bypass_rests = None;
    rig.all_ok([attach(1, 1)]);
    rig.mapper(1).exhaust_map(0);
    assert_eq!(rig.status(&detach(1, 1)), NOMEM);
    assert!(rig.mapper(1).is_empty());
    assert_eq!(rig.status(&detach(1, 1)), INVAL, "it is detached");
}

#[test]
fn attach_that_fails_returns_to_bypass() {
    let mut rig = Rig::new();
    rig.engine.write_bypass(1);
    rig.all_ok([attach(1, 1), map(1, 0, 0xfff, 0, READ)]);
    rig.mapper(2).fail_map(0);
    assert_eq!(rig.status(&attach(2, 1)), DEVERR);
    assert_all_ram(&rig, 2);
    rig.engine.write_bypass(0);
    assert!(rig.mapper(2).is_empty());
}

#[test]
fn shared_address_space_in_bypass_holds_ram_once() {
    let mut rig = Rig::new();
    let group = TestGroup::default();
    for id in [11, 12] {
        let limits = MapperLimits { page_size_mask: !0xfff, iova_ranges: vec![0..=u64::MAX], max_mappings: None };
        let mapper = group.mapper(id, limits);
        rig.mappers.insert(id, mapper.probe());
        rig.engine.add_endpoint(id, Box::new(mapper)).expect("it is valid");
    }
    rig.all_ok([attach(11, 1), attach(12, 1)]);
    rig.engine.write_bypass(1);
    rig.engine.bypass_rests = None;
    rig.all_ok([detach(11, 1)]);
    assert_eq!(group.mapper_of(11).mappings().len(), 3);
    assert!(group.mapper_of(12).is_empty());
    rig.all_ok([attach(11, 1)]);
    assert!(group.mapper_of(11).is(&group.mapper_of(12)) && group.mapper_of(11).is_empty());
    rig.engine.reset();
    let used: Vec<_> = [11, 12].map(|id| rig.mapper(id).mappings().len()).into();
    assert_eq!(used.iter().sum::<usize>(), 3, "{used:?}");
    rig.engine.accept_features(u64::MAX);
    rig.engine.write_bypass(0);
    rig.assert_host_is_clean();
}

/// Address and size of the RAM that a test adds later.
const LATER: (u64, usize) = (2 << 32, 0x20_0000);

/// Returns an engine with endpoint 1 in a bypass domain, endpoint 2 in another domain, and endpoint 3 unattached.
fn rig_with_later_ram() -> Rig {
    let mut rig = Rig::with_ram(engine_config(), TestRam::new(&[(0, 0x10_0000), LATER]).with_later(LATER.0));
    rig.engine.write_bypass(1);
    rig.engine.bypass_rests = None;
    rig.all_ok([attach_bypass(1, 1), attach(2, 2)]);
    rig
}

fn mapped_gpas(rig: &Rig, id: u32) -> Vec<u64> {
    rig.mapper(id).mappings().keys().copied().collect()
}

#[test]
fn added_ram_is_accessible_only_in_bypass() {
    let mut rig = rig_with_later_ram();
    rig.engine.add_ram(LATER.0, LATER.1 as u64).unwrap();
    assert_eq!([1, 2, 3].map(|id| mapped_gpas(&rig, id)), [vec![0, LATER.0], vec![], vec![0, LATER.0]]);
    rig.all_ok([detach(2, 2), detach(1, 1), attach_bypass(3, 3)]);
    assert_eq!([1, 2, 3].map(|id| mapped_gpas(&rig, id)), [(); 3].map(|()| vec![0, LATER.0]));
    rig.engine.write_bypass(0);
    rig.assert_reset_cleans_host();
}

#[test]
fn ram_that_one_mapper_cannot_map_is_added_for_no_endpoint() {
    let mut rig = rig_with_later_ram();
    rig.mapper(3).exhaust_map(0);
    let refused = rig.engine.add_ram(LATER.0, LATER.1 as u64);
    assert!(matches!(refused, Err(ConfigError::EndpointBypass(3))), "{refused:?}");
    assert_eq!([1, 2, 3].map(|id| mapped_gpas(&rig, id)), [vec![0], vec![], vec![0]]);
    rig.engine.add_ram(LATER.0, LATER.1 as u64).unwrap();
    assert_eq!([1, 3].map(|id| mapped_gpas(&rig, id)), [(); 2].map(|()| vec![0, LATER.0]));
}

#[test]
fn ram_refused_after_a_driver_maps_it_is_unmapped_everywhere() {
    let mut rig = rig_with_later_ram();
    let len = LATER.1 as u64;
    // Map the whole region, map its last page a second time, and map a page outside of the region.
    rig.all_ok([map(2, 0, len - 1, LATER.0, BOTH), map(2, len, len + PAGE - 1, LATER.0 + len - PAGE, READ)]);
    rig.all_ok([map(2, 2 * len, 2 * len + PAGE - 1, 0xf_f000, READ), attach(3, 2)]);
    assert!(rig.engine.take_ram(LATER.0, len));
    assert_eq!([1, 2, 3].map(|id| mapped_gpas(&rig, id)), [vec![0], vec![2 * len], vec![2 * len]]);
    assert_eq!(rig.engine.counters().mappings, 1);
    // Add the RAM again. The removed mappings do not return: the driver has to map the RAM again.
    rig.engine.add_ram(LATER.0, len).unwrap();
    assert_eq!([1, 2, 3].map(|id| mapped_gpas(&rig, id)), [vec![0, LATER.0], vec![2 * len], vec![2 * len]]);
    rig.all_ok([map(2, 0, len - 1, LATER.0, BOTH), unmap(2, 0, 2 * len + PAGE - 1), detach(3, 2)]);
    rig.engine.system_reset();
    rig.assert_host_is_clean();
}

#[test]
fn removed_ram_is_unmapped_from_bypass() {
    let mut rig = rig_with_later_ram();
    rig.engine.add_ram(LATER.0, LATER.1 as u64).unwrap();
    assert!(rig.engine.take_ram(LATER.0, LATER.1 as u64));
    assert_eq!([1, 2, 3].map(|id| mapped_gpas(&rig, id)), [vec![0], vec![], vec![0]]);
    assert_eq!(rig.engine.counters().mappings, 0);
    rig.all_ok([detach(2, 2), attach_bypass(3, 3)]);
    assert_eq!([1, 2, 3].map(|id| mapped_gpas(&rig, id)), [(); 3].map(|()| vec![0]));
    rig.engine.system_reset();
    rig.assert_host_is_clean();
}

#[test]
fn mapping_that_overlaps_removed_ram_is_removed_completely() {
    let mut rig = Rig::new();
    rig.all_ok([attach(1, 1), map(1, 0, 2 * PAGE - 1, SECOND_REGION - PAGE, BOTH)]);
    rig.all_ok([map(1, 2 * PAGE, 3 * PAGE - 1, SECOND_REGION - PAGE, BOTH)]);
    assert!(rig.engine.take_ram(SECOND_REGION, RAM_END - SECOND_REGION));
    assert_eq!(mapped_gpas(&rig, 1), [2 * PAGE]);
}

#[test]
fn take_ram_fails_while_the_host_cannot_unmap() {
    let mut rig = rig_with_later_ram();
    rig.all_ok([map(2, 0, PAGE - 1, LATER.0, BOTH)]);
    rig.mapper(2).refuse_unmaps(true);
    assert!(!rig.engine.take_ram(LATER.0, LATER.1 as u64));
    assert!(!rig.engine.take_ram(LATER.0, LATER.1 as u64));
    rig.mapper(2).refuse_unmaps(false);
    assert!(rig.engine.take_ram(LATER.0, LATER.1 as u64));
    assert!(rig.mapper(2).is_empty());
    rig.all_ok([map(2, 0, PAGE - 1, 0, BOTH)]);
}

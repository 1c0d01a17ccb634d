// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of MAP and UNMAP.

use std::time::Duration;

use super::*;
use crate::test_utils::*;
use crate::{Limits, Permissions};

#[test]
fn map_gives_access_to_the_memory_with_its_permissions() {
    for (flags, permissions) in [(READ, Permissions::READ), (WRITE, Permissions::WRITE), (BOTH, Permissions::all())] {
        let mut rig = Rig::attached();
        rig.all_ok([map(1, 0x10_0000, 0x10_1fff, 0x5000, flags)]);
        let reached = rig.mapper(1).translate(0x10_1234);
        let expected = rig.ram.host_address(0x6234);
        assert_eq!(reached, Some((expected, permissions)));
        assert_eq!(rig.mapper(1).translate(0x10_2000), None);
    }
}

#[test]
fn map_serves_every_endpoint_of_the_domain_and_no_other() {
    let mut rig = Rig::attached();
    rig.all_ok([attach(2, 1), attach(3, 2), map(1, 0, 0xfff, 0, READ)]);
    assert_eq!(rig.mapper(1).mappings(), rig.mapper(2).mappings());
    assert!(rig.mapper(3).is_empty());
    assert_eq!(rig.engine.counters().mappings, 1);
    assert_eq!(rig.engine.counters().mapped_bytes, 2 * PAGE);
}

#[test]
fn unaligned_map_is_out_of_range() {
    let mut rig = Rig::attached();
    assert_eq!(rig.status(&map(1, 0x800, 0xfff, 0, READ)), RANGE);
    assert_eq!(rig.status(&map(1, 0, 0xffe, 0, READ)), RANGE);
    assert_eq!(rig.status(&map(1, 0, 0x1000, 0, READ)), RANGE);
    assert_eq!(rig.status(&map(1, 0, 0xfff, 0x10, READ)), RANGE);
    assert_eq!(rig.status(&map(1, 0x1000, 0x1000, 0, READ)), RANGE);
}

#[test]
fn map_outside_the_input_range_is_out_of_range() {
    let mut rig = Rig::attached();
    let end = 1 << 48;
    assert_eq!(rig.status(&map(1, end, end + 0xfff, 0, READ)), RANGE);
    assert_eq!(rig.status(&map(1, end - PAGE, end + 0xfff, 0, READ)), RANGE);
    assert_eq!(rig.status(&map(1, 0, u64::MAX, 0, READ)), RANGE);
    assert_eq!(rig.status(&map(1, end - PAGE, end - 1, 0, READ)), OK);
}

#[test]
fn map_over_the_msi_window_is_out_of_range() {
    let mut rig = Rig::attached();
    let window = 0xfee0_0000;
    assert_eq!(rig.status(&map(1, window, window + 0xfff, 0, READ)), RANGE);
    let around = map(1, window - PAGE, window + 0xfff, 0, READ);
    assert_eq!(rig.status(&around), RANGE);
    assert_eq!(rig.status(&map(1, window - PAGE, window - 1, 0, READ)), OK);
}

#[test]
fn map_or_unmap_that_touches_the_aperture_is_out_of_range() {
    let mut rig = Rig::attached();
    let end = APERTURE + APERTURE_CHUNKS * CHUNK;
    let touching = [
        (APERTURE, APERTURE + 0xfff),
        (APERTURE - PAGE, APERTURE + 0xfff),
        (end - PAGE, end - 1),
        (end - PAGE, end + 0xfff),
        (APERTURE - PAGE, end + 0xfff),
    ];
    for (start, last) in touching {
        assert_eq!(rig.status(&map(1, start, last, 0, READ)), RANGE);
        assert_eq!(rig.status(&unmap(1, start, last)), RANGE);
    }
    rig.all_ok([
        map(1, APERTURE - PAGE, APERTURE - 1, 0, READ),
        map(1, end, end + 0xfff, 0, READ),
        unmap(1, APERTURE - PAGE, APERTURE - 1),
        unmap(1, end, end + 0xfff),
    ]);
}

#[test]
fn without_bounce_windows_the_aperture_is_like_any_address() {
    let mut rig = Rig::standard();
    rig.all_ok([attach(1, 1), map(1, APERTURE, APERTURE + 0xfff, 0, READ), unmap(1, 0, u64::MAX)]);
    rig.assert_host_is_clean();
}

#[test]
fn flags_that_are_unknown_or_none_are_invalid() {
    let mut rig = Rig::attached();
    // 4 is the MMIO flag, which needs the feature MMIO. The device does not offer this feature.
    for flags in [0, 4, 4 | BOTH, 8 | READ, 1 << 31 | BOTH] {
        assert_eq!(rig.status(&map(1, 0, 0xfff, 0, flags)), INVAL);
    }
}

#[test]
fn map_that_ends_before_it_starts_is_invalid() {
    let mut rig = Rig::attached();
    assert_eq!(rig.status(&map(1, 0x1000, 0xfff, 0, READ)), INVAL);
    assert_eq!(rig.status(&map(1, 0x2000, 0xfff, 0, READ)), INVAL);
    assert_eq!(rig.status(&unmap(1, 0x1000, 0xfff)), INVAL);
}

#[test]
fn map_outside_ram_is_invalid() {
    let mut rig = Rig::attached();
    assert_eq!(rig.status(&map(1, 0, 0xfff, RAM_END, READ)), INVAL);
    // The range starts in RAM and ends outside.
    assert_eq!(rig.status(&map(1, 0, 0x1fff, RAM_END - PAGE, READ)), INVAL);
    assert_eq!(rig.status(&map(1, 0, 0xfff, APERTURE, READ)), INVAL);
    let beyond = u64::MAX - 0xfff;
    assert_eq!(rig.status(&map(1, 0, 0xfff, beyond, READ)), INVAL);
    assert_eq!(rig.status(&map(1, 0, 0x1fff, beyond, READ)), INVAL);
    assert_eq!(rig.engine.counters().host_maps, 0);
}

#[test]
fn map_over_a_mapping_is_invalid() {
    let mut rig = Rig::attached();
    rig.all_ok([map(1, 0x2000, 0x3fff, 0, READ)]);
    for (start, last) in
        [(0x2000, 0x3fff), (0x2000, 0x2fff), (0x3000, 0x3fff), (0x1000, 0x2fff), (0x3000, 0x4fff), (0x1000, 0x4fff)]
    {
        assert_eq!(rig.status(&map(1, start, last, 0, BOTH)), INVAL);
    }
    rig.all_ok([map(1, 0x1000, 0x1fff, 0, READ), map(1, 0x4000, 0x4fff, 0, READ)]);
}

#[test]
fn requests_on_a_domain_that_does_not_exist_are_no_entry() {
    let mut rig = Rig::attached();
    assert_eq!(rig.status(&map(2, 0, 0xfff, 0, READ)), NOENT);
    assert_eq!(rig.status(&unmap(2, 0, 0xfff)), NOENT);
}

#[test]
fn map_and_unmap_are_unsupported_without_their_feature() {
    let mut rig = Rig::new();
    rig.engine.accept_features(feature::INPUT_RANGE);
    rig.all_ok([attach(1, 1)]);
    assert_eq!(rig.status(&map(1, 0, 0xfff, 0, READ)), UNSUPP);
    assert_eq!(rig.status(&unmap(1, 0, 0xfff)), UNSUPP);
}

#[test]
fn mappings_have_a_limit() {
    let mut config = engine_config();
    config.limits = Limits { max_mappings: 2, ..Limits::default() };
    let mut rig = Rig::with_config(config);
    rig.all_ok([attach(1, 1), attach(2, 2), map(1, 0, 0xfff, 0, READ), map(2, 0, 0xfff, 0, READ)]);
    assert_eq!(rig.status(&map(1, 0x1000, 0x1fff, 0, READ)), NOMEM);
    rig.all_ok([unmap(2, 0, 0xfff), map(1, 0x1000, 0x1fff, 0, READ)]);
}

#[test]
fn map_across_regions_of_ram_maps_each_part() {
    let mut rig = Rig::attached();
    let gpa = SECOND_REGION - 2 * PAGE;
    rig.all_ok([map(1, 0x10_0000, 0x10_3fff, gpa, WRITE)]);
    assert_eq!(rig.mapper(1).mappings().len(), 2);
    for offset in [0, 0x1fff, 0x2000, 0x3fff] {
        let reached = rig.mapper(1).translate(0x10_0000 + offset);
        let expected = rig.ram.host_address(gpa + offset);
        assert_eq!(reached, Some((expected, Permissions::WRITE)));
    }
    assert_eq!(rig.engine.counters().mappings, 1);
    assert_eq!(rig.status(&unmap(1, 0x10_0000, 0x10_1fff)), RANGE);
    rig.all_ok([unmap(1, 0x10_0000, 0x10_3fff)]);
    rig.assert_host_is_clean();
}

/// Sends the UNMAPs of the examples in section 5.13.6.5. One address of an example is one page here.
#[test]
fn unmap_follows_the_examples_of_the_specification() {
    let page = |first: u64, last: u64| (first * PAGE, last * PAGE + PAGE - 1);
    // Each case has the mappings, the range to unmap, the status of the UNMAP, and the number of remaining mappings.
    type Range = (u64, u64);
    let cases: [(&[Range], Range, u8, usize); 7] = [
        (&[], page(0, 4), OK, 0),
        (&[page(0, 9)], page(0, 9), OK, 0),
        (&[page(0, 4), page(5, 9)], page(0, 9), OK, 0),
        (&[page(0, 9)], page(0, 4), RANGE, 1),
        (&[page(0, 4), page(5, 9)], page(0, 4), OK, 1),
        (&[page(0, 4)], page(0, 9), OK, 0),
        (&[page(0, 4), page(10, 14)], page(0, 14), OK, 0),
    ];
    for (place, (mappings, (start, last), status, left)) in cases.into_iter().enumerate() {
        let mut rig = Rig::attached();
        for (start, last) in mappings {
            rig.all_ok([map(1, *start, *last, 0, READ)]);
        }
        let case = place + 1;
        assert_eq!(rig.status(&unmap(1, start, last)), status, "example {case}");
        assert_eq!(rig.mapper(1).mappings().len(), left, "example {case}");
    }
}

#[test]
fn unmap_that_splits_at_either_end_removes_nothing() {
    let mut rig = Rig::attached();
    rig.all_ok([map(1, 0x1000, 0x2fff, 0, READ), map(1, 0x3000, 0x3fff, 0, READ), map(1, 0x5000, 0x6fff, 0, READ)]);
    for (start, last) in [
        (0x2000, 0x3fff),
        (0x2000, 0x2fff),
        (0x3000, 0x5fff),
        (0, 0x1fff),
        (0x2000, 0x9fff),
        (0x1000, 0x5fff),
        (0x1001, 0x6fff),
        (0x1000, 0x6ffe),
        (0x1800, 0x27ff),
    ] {
        assert_eq!(rig.status(&unmap(1, start, last)), RANGE, "{start:#x}");
    }
    assert_eq!(rig.mapper(1).mappings().len(), 3);
    assert_eq!(rig.engine.counters().host_unmaps, 0);
}

#[test]
fn unmap_range_may_exceed_mappings_and_be_unaligned() {
    let mut rig = Rig::attached();
    rig.all_ok([map(1, 0x1000, 0x1fff, 0, READ), unmap(1, 0xff1, 0x2003)]);
    assert!(rig.mapper(1).is_empty());
}

#[test]
fn adjacent_mappings_are_unmapped_by_one_host_call() {
    let mut rig = Rig::attached();
    rig.all_ok([attach(2, 1)]);
    for page in [1, 2, 3, 5, 6] {
        rig.all_ok([map(1, page * PAGE, page * PAGE + 0xfff, 0, READ)]);
    }
    rig.all_ok([unmap(1, 0, 0xffff)]);
    assert_eq!(rig.engine.counters().host_unmaps, 2 * 2);
    assert!(rig.mapper(1).is_empty() && rig.mapper(2).is_empty());
    assert_eq!(rig.engine.counters().mappings, 0);
}

#[test]
fn unmap_with_reserved_bytes_is_invalid() {
    let mut rig = Rig::attached();
    rig.all_ok([map(1, 0, 0xfff, 0, READ)]);
    let mut request = unmap(1, 0, 0xfff);
    request[27] = 1;
    assert_eq!(rig.status(&request), INVAL);
    assert_eq!(rig.mapper(1).mappings().len(), 1);
}

#[test]
fn unmap_at_the_end_of_all_addresses_does_not_wrap() {
    let mut config = engine_config();
    config.input_range = 0..=u64::MAX;
    let mut rig = Rig::with_config(config);
    let mapper = RecordingMapper::with_ranges(vec![0..=u64::MAX]);
    let wide = mapper.probe();
    let added = rig.engine.add_endpoint(4, Box::new(mapper));
    added.expect("it is valid");
    let top = u64::MAX - 0xfff;
    rig.all_ok([attach(4, 1), map(1, top, u64::MAX, 0, READ)]);
    assert_eq!(wide.mappings().len(), 1);
    rig.all_ok([detach(4, 1), attach(4, 1), map(1, top, u64::MAX, 0, READ)]);
    rig.all_ok([unmap(1, top, u64::MAX)]);
    assert!(wide.is_empty());
}

#[test]
fn map_near_the_end_of_all_addresses_does_not_wrap() {
    let mut config = engine_config();
    (config.input_range, config.domain_range) = (0..=u64::MAX, 0..=u32::MAX);
    let mut rig = Rig::with_config(config);
    let mapper = RecordingMapper::with_ranges(vec![0..=u64::MAX]);
    let wide = mapper.probe();
    rig.engine.add_endpoint(4, Box::new(mapper)).expect("it is valid");
    let (domain, top) = (u32::MAX, u64::MAX - 0xfff);
    rig.all_ok([attach(4, domain)]);
    for (start, last, gpa, status) in [
        // Ranges of one byte.
        (top, top, 0, RANGE),
        (u64::MAX, u64::MAX, 0, RANGE),
        // The range of all addresses, whose length does not fit in 64 bits.
        (0, u64::MAX, 0, RANGE),
        (top, top - 1, 0, INVAL),
        (top, 0, 0, INVAL),
        // The guest-physical range wraps.
        (0, 0x1fff, top, INVAL),
        (top - PAGE, u64::MAX, top, INVAL),
    ] {
        assert_eq!(rig.status(&map(domain, start, last, gpa, READ)), status, "{start:#x} to {last:#x}, {gpa:#x}");
        assert!(wide.is_empty());
    }
    rig.all_ok([map(domain, top, u64::MAX, 0, READ)]);
    assert_eq!(rig.status(&map(domain, top - PAGE, u64::MAX, 0, READ)), INVAL);
    rig.all_ok([unmap(domain, top, u64::MAX), detach(4, domain)]);
    assert!(wide.is_empty());
}

#[test]
fn peak_stays_when_mappings_are_removed() {
    let mut rig = Rig::attached();
    rig.all_ok([map(1, 0, 0x3fff, 0, READ), unmap(1, 0, 0x3fff)]);
    rig.all_ok([map(1, 0, 0xfff, 0, READ)]);
    let counters = rig.engine.counters();
    assert_eq!(counters.mapped_bytes, 0x1000);
    assert_eq!(counters.peak_mapped_bytes, 0x4000);
}

#[test]
fn slow_batch_refuses_map_and_attach_but_not_unmap_or_detach() {
    let mut rig = Rig::new();
    rig.all_ok([attach(1, 1)]);
    rig.mapper(1).delay(Duration::from_millis(300));
    let page = |number: u64| (number << 12, (number << 12) + 0xfff);
    rig.engine.begin_batch();
    let answers: Vec<_> = (0..6)
        .map(|number| {
            let (first, last) = page(number);
            rig.status(&map(1, first, last, 0, READ))
        })
        .collect();
    let served = answers.iter().take_while(|status| **status == OK).count();
    assert!((1..=4).contains(&served) && answers[served..].iter().all(|status| *status == NOMEM), "{answers:?}");
    assert_eq!(rig.status(&attach(2, 1)), NOMEM);
    rig.all_ok([unmap(1, 0, 0xfff), detach(1, 1)]);
    rig.engine.end_batch();
    rig.mapper(1).delay(Duration::ZERO);
    rig.engine.begin_batch();
    rig.all_ok([attach(1, 1), map(1, 0, 0xfff, 0, READ)]);
    rig.engine.end_batch();
}

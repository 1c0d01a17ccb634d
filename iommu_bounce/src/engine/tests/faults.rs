// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of translation for emulated devices, and of fault reports to the driver.

use super::*;
use crate::test_utils::*;
use crate::{Fault, FaultReason, Permissions, Target};

const R: Permissions = Permissions::READ;
const W: Permissions = Permissions::WRITE;

#[test]
fn translation_matches_the_mappings() {
    let mut rig = Rig::new();
    rig.all_ok([attach(1, 1), map(1, 0x1000, 0x3fff, 0x8000, READ), attach_bypass(2, 2)]);
    rig.add_chunk(1, APERTURE);
    rig.add_chunk(1, APERTURE + CHUNK);
    let cases = [
        (1, 0x1000, R, Target::Ram(0x8000), 0x3000),
        (1, 0x2fff, R, Target::Ram(0x9fff), 0x1001),
        (1, APERTURE + CHUNK + 5, R | W, Target::Chunk { index: 1, offset: 5 }, CHUNK - 5),
        (2, SECOND_REGION + 1, R | W, Target::Ram(SECOND_REGION + 1), 0x10_0000 - 1),
    ];
    for (endpoint, iova, access, target, len) in cases {
        let found = rig.engine.translate(endpoint, iova, access).expect("it is mapped");
        assert_eq!((found.target, found.len), (target, len), "{endpoint} {iova:#x}");
    }
    assert!(!rig.engine.has_faults());
}

#[test]
fn refused_access_is_reported_with_its_reason() {
    let mut rig = Rig::new();
    rig.all_ok([attach(1, 1), map(1, 0x1000, 0x1fff, 0x8000, READ)]);
    rig.add_chunk(1, APERTURE + CHUNK);
    let cases = [
        (1, APERTURE + 2 * CHUNK, R, FaultReason::Mapping),
        (1, APERTURE + 9 * CHUNK + 7, R, FaultReason::Mapping),
        (1, 0xfff, R, FaultReason::Mapping),
        (1, 0x2000, R, FaultReason::Mapping),
        (1, 0x1000, W, FaultReason::Mapping),
        (1, 0x1000, R | W, FaultReason::Mapping),
        (1, APERTURE, R, FaultReason::Mapping),
        (2, 0x1000, R, FaultReason::Domain),
    ];
    for (endpoint, iova, access, reason) in cases {
        let fault = rig.engine.translate(endpoint, iova, access).expect_err("it is not allowed");
        assert_eq!(fault, Fault { reason, endpoint, address: Some(iova), access });
        assert_eq!(rig.engine.take_fault(), Some(fault));
    }
    assert_eq!(rig.engine.counters().faults, 8);
    // A fault of an unknown endpoint is not reported to the driver.
    assert!(rig.engine.translate(9, 0, R).is_err());
    assert_eq!((rig.engine.take_fault(), rig.engine.counters().faults_dropped), (None, 1));
}

#[test]
fn unattached_endpoint_in_bypass_mode_accesses_ram() {
    let mut rig = Rig::new();
    rig.engine.write_bypass(1);
    let found = rig.engine.translate(1, 0x5000, W).expect("it is RAM");
    assert_eq!(found.target, Target::Ram(0x5000));
    let hole = rig.engine.translate(1, APERTURE, W).expect_err("no RAM is there");
    assert_eq!(hole.reason, FaultReason::Mapping);
}

#[test]
fn excess_faults_and_faults_at_reset_are_counted_as_dropped() {
    let mut rig = Rig::new();
    for _ in 0..500 {
        rig.engine.translate(1, 0, R).expect_err("it is attached to no domain");
    }
    let counters = rig.engine.counters();
    assert_eq!(counters.faults + counters.faults_dropped, 500);
    assert!(counters.faults >= 64 && counters.faults < 400, "{counters:?}");
    rig.engine.take_fault().expect("a fault is pending");
    rig.engine.reset();
    assert!(!rig.engine.has_faults());
    assert_eq!(rig.engine.counters().faults_dropped, counters.faults_dropped + 63);
}

#[test]
fn attach_that_cannot_be_undone_is_reported_as_a_fault() {
    let mut rig = Rig::new();
    rig.all_ok([attach(1, 1), map(1, 0, 0xfff, 0, READ), attach(2, 2), map(2, 0, 0xfff, 0, READ)]);
    // The host fails to map the new domain, and the old domain is mapped again.
    rig.mapper(1).exhaust_map(0);
    assert_eq!(rig.status(&attach(1, 2)), NOMEM);
    assert!(!rig.engine.has_faults(), "nothing has changed");
    rig.mapper(1).refuse_unmaps(true);
    assert_eq!(rig.status(&detach(1, 1)), DEVERR);
    rig.mapper(1).heal();
    rig.all_ok([
        attach(1, 1),
        map(1, 0, 0xfff, 0, READ),
        map(1, 0x1000, 0x1fff, 0, READ),
        map(2, 0x5000, 0x5fff, 0, READ),
    ]);
    rig.mapper(1).fail_map(1);
    rig.mapper(1).fail_unmap(1);
    assert_eq!(rig.status(&attach(1, 2)), DEVERR);
    let fault = rig.engine.take_fault().expect("the fault is reported");
    assert_eq!((fault.reason, fault.endpoint, fault.address), (FaultReason::Unknown, 1, None));
}

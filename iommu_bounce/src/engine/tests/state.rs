// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of saving and restoring.

use super::*;
use crate::test_utils::*;
use crate::{EngineState, Fault, FaultReason, Permissions, RestoreError};

/// Returns a rig whose guest has created domains, mappings and a chunk, and has caused a fault.
fn lived() -> Rig {
    let mut rig = Rig::new();
    rig.all_ok([attach(1, 1), attach(2, 1), map(1, 0, 0x2fff, 0x8000, READ)]);
    rig.all_ok([map(1, 0x5000, 0x6fff, SECOND_REGION - PAGE, BOTH), attach_bypass(3, 9)]);
    rig.add_chunk(1, APERTURE);
    rig.add_chunk(1, APERTURE + 3 * CHUNK);
    rig.all_ok([window_del(1, APERTURE)]);
    rig.engine.set_budget(2 * CHUNK).expect("it fits");
    rig.engine.write_bypass(1);
    rig.engine.set_max_mapped_bytes(Some(1 << 40)).expect("it is not 0");
    let fault = Fault { reason: FaultReason::Mapping, endpoint: 2, address: Some(0x7000), access: Permissions::WRITE };
    assert!(rig.engine.report_fault(fault));
    rig
}

#[test]
fn restored_engine_and_host_are_the_same() {
    let old = lived();
    let state = old.engine.state();
    let text = serde_json::to_string(&state).expect("it serializes");
    let read: EngineState = serde_json::from_str(&text).expect("it is what was written");
    assert_eq!(read, state);
    let mut new = Rig::new();
    new.engine.reset();
    new.engine.restore(&read).expect("it is valid");
    assert_eq!(new.engine.state(), state);
    let shape = |rig: &Rig, id| -> Vec<_> {
        let mappings = rig.mapper(id).mappings();
        mappings.iter().map(|(iova, mapping)| (*iova, mapping.len, mapping.permissions)).collect()
    };
    for id in 1..=3 {
        assert_eq!(shape(&new, id), shape(&old, id), "endpoint {id}");
    }
    assert_eq!(new.engine.config_space(), old.engine.config_space());
    // The chunk keeps its place: index 1, although index 0 is free.
    assert_eq!(state.domains[0].chunks[0].index, 1);
    new.all_ok([unmap(1, 0, 0xffff), window_del(1, APERTURE + 3 * CHUNK), detach(3, 9)]);
    assert_eq!(new.add_chunk(1, APERTURE), 0);
}

#[test]
fn state_without_a_threshold_for_writes_restores_zero() {
    let mut old = Rig::attached();
    assert!(old.engine.set_threshold_write(0x3000).expect("there are windows"));
    let mut state = serde_json::to_value(old.engine.state()).expect("states can be serialized");
    let restored = |state: &serde_json::Value| {
        let mut new = Rig::new();
        new.engine.reset();
        new.engine.restore(&serde_json::from_value(state.clone()).expect("it is a state")).expect("it is valid");
        (new.engine.threshold(), new.engine.threshold_write())
    };
    assert_eq!(restored(&state), (0x4000, 0x3000));
    // States of earlier releases do not have the field.
    assert!(state["window"].as_object_mut().unwrap().remove("threshold_write").is_some());
    assert_eq!(restored(&state), (0x4000, 0));
}

#[test]
fn state_that_is_refused_leaves_a_fresh_engine() {
    type Spoil = fn(&mut EngineState);
    let cases: [(Spoil, &str); 15] = [
        (|s| s.version = 2, "version 2"),
        (|s| s.accepted |= 1 << 3, "the driver accepted the features"),
        (|s| s.window = None, "this VM has bounce windows, but the saved VM has none"),
        (|s| s.window.as_mut().unwrap().budget = 1 << 40, "window: the window budget"),
        (
            |s| s.window.as_mut().unwrap().aperture = Some((HIGH, HIGH + CHUNK - 1)),
            "the saved aperture is 0x200000000 to",
        ),
        (|s| s.domains[0].endpoints[1] = 77, "domain 1: cannot restore endpoint 0x4d (status NoEnt)"),
        (|s| s.domains[0].endpoints.clear(), "domain 1: cannot restore this domain, which has no endpoint"),
        (|s| s.domains[1].domain = 1, "domain 1: cannot restore this domain, which occurs twice"),
        (|s| s.domains[0].mappings[0].gpa = 1 << 40, "domain 1: cannot restore mapping at 0x0 (status Inval)"),
        (|s| s.domains[0].mappings[1].start = 0x2000, "domain 1: cannot restore mapping at 0x2000 (status Inval)"),
        (|s| s.domains[0].chunks[0].index = 99, "domain 1: cannot restore chunk at 0xe0030000 (status Inval)"),
        (|s| s.domains[0].chunks[0].iova += 1, "domain 1: cannot restore chunk at 0xe0030001 (status Range)"),
        (|s| s.faults[0].endpoint = 77, "faults: a pending fault names endpoint 0x4d, which does not exist"),
        (|s| s.faults = vec![s.faults[0]; 65], "faults: 65 faults are pending"),
        (
            |s| s.domains[1].chunks = s.domains[0].chunks.clone(),
            "domain 9: cannot restore chunk at 0xe0030000 (status Inval)",
        ),
    ];
    let good = lived().engine.state();
    let mut rig = Rig::new();
    rig.engine.reset();
    for (spoil, wanted) in cases {
        let mut state = good.clone();
        spoil(&mut state);
        let error = rig.engine.restore(&state).expect_err(wanted).to_string();
        assert!(error.contains(wanted), "{error}");
        rig.assert_host_is_clean();
        rig.engine.set_budget(BUDGET_CHUNKS * CHUNK).expect("it fits");
    }
    rig.mapper(2).exhaust_map(2);
    let error = rig.engine.restore(&good).expect_err("the host is full");
    assert!(matches!(error, RestoreError::Domain { .. } | RestoreError::Bypass(_)), "{error}");
    rig.assert_host_is_clean();
    rig.engine.restore(&good).expect("the host is well again");
    assert_eq!(rig.engine.restore(&good), Err(RestoreError::NotFresh));
}

#[test]
fn windows_above_a_lowered_budget_are_restored_with_it() {
    let mut old = lived();
    old.add_chunk(1, APERTURE + 5 * CHUNK);
    old.engine.set_budget(CHUNK).expect("what is backed stays");
    let state = old.engine.state();
    let mut new = Rig::new();
    new.engine.reset();
    new.engine.restore(&state).expect("it is the saved state");
    assert_eq!(new.engine.state(), state);
    assert_eq!(new.engine.budget(), CHUNK);
}

#[test]
fn fault_of_a_removed_endpoint_is_not_in_the_state() {
    let fault = |endpoint| Fault { reason: FaultReason::Domain, endpoint, address: None, access: Permissions::READ };
    let mut old = Rig::new();
    for endpoint in [2, 1, 2] {
        assert!(old.engine.report_fault(fault(endpoint)));
    }
    old.engine.remove_endpoint(2).expect("it exists");
    let state = old.engine.state();
    let mut new = Rig::new();
    new.engine.remove_endpoint(2).expect("it exists");
    new.engine.reset();
    new.engine.restore(&state).expect("nothing of the endpoint is left");
    assert_eq!((new.engine.take_fault(), new.engine.take_fault()), (Some(fault(1)), None));
    assert_eq!(old.engine.counters().faults_dropped, 2, "they are counted as dropped");
}

#[test]
fn same_chunk_twice_is_refused() {
    let mut state = lived().engine.state();
    let mut again = state.domains[0].chunks[0];
    again.iova += CHUNK;
    state.domains[0].chunks.push(again);
    let mut rig = Rig::new();
    rig.engine.reset();
    assert!(rig.engine.restore(&state).is_err());
    rig.assert_host_is_clean();
}

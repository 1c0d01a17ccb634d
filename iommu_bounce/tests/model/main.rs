// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Random sequences of encoded requests, checked against a simple model of the device, on a host that may fail.

mod long;
mod model;
mod ops;
mod rig;
mod setup;

use iommu_bounce::spec::Status;
use proptest::prelude::*;

use crate::ops::{HostFailure, Op, any_op, map_failure, unmap_failure};
use crate::rig::Rig;

/// Sends each request, and checks after each one that engine, model and host agree.
fn agree(ops: &[(Option<HostFailure>, Op)]) {
    let mut rig = Rig::new();
    for (failure, op) in ops {
        if rig.model.is_undecided(op) {
            continue;
        }
        rig.model.host = rig.look();
        // While bypass is on, let no host call fail. If the host failed to map RAM, an endpoint would have no access, and the model does
        // not predict this. Only `survive` tests this case.
        if let Some(failure) = failure.as_ref().filter(|_| !rig.model.bypass) {
            rig.inject(failure);
        }
        let failures = rig.host_failures();
        let before = rig.engine.counters();
        let status = rig.perform(op);
        let host_failed = rig.host_failures() != failures;
        let mut expected = rig.model.clone();
        let predicted = expected.apply(op);
        // The engine may have avoided the failure by releasing parked chunks.
        let failed_for_good = [[Status::NoMem as u8], [Status::DevErr as u8]].iter().any(|failed| status == *failed);
        // The host may fail at an earlier range of a list than the range that the model refuses.
        let host_decides = predicted == [Status::Ok as u8] || op.is_list();
        if matches!(op, Op::WriteBypass { .. }) && host_failed || host_failed && failed_for_good && host_decides {
            expected = rig.model.clone();
        } else {
            assert_eq!(status, predicted, "{op:?}");
        }
        rig.model = expected;
        rig.heal();
        rig.check_state();
        rig.check_budget(&before);
    }
    rig.end();
    rig.check_empty();
}

/// Sends each request to an engine whose host calls may all fail, even the calls that undo a failed request. The test host panics if the
/// engine breaks a rule. The engine's counters must match the host. When the host works again and the VM was reset, nothing may remain
/// mapped.
fn survive(ops: &[(Option<HostFailure>, Op)]) {
    let mut rig = Rig::new();
    for (failure, op) in ops {
        if let Some(failure) = failure {
            rig.inject(failure);
        }
        let before = rig.engine.counters();
        rig.perform(op);
        rig.check_counters();
        rig.check_budget(&before);
    }
    rig.heal();
    rig.end();
    rig.check_empty();
}

/// Returns a configuration with few cases, because generating cases takes most of the time. `PROPTEST_CASES` sets another number.
fn config() -> ProptestConfig {
    let default = ProptestConfig::default();
    let chosen = std::env::var_os("PROPTEST_CASES").map(|_| default.cases);
    ProptestConfig { cases: chosen.unwrap_or(250), failure_persistence: None, ..default }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn engine_model_and_host_agree(
        ops in prop::collection::vec((prop::option::weighted(0.2, map_failure()), any_op()), 1..80),
    ) {
        agree(&ops);
    }

    #[test]
    fn nothing_remains_after_a_host_that_fails_to_undo(
        ops in prop::collection::vec((prop::option::weighted(0.4, unmap_failure()), any_op()), 1..80),
    ) {
        survive(&ops);
    }

    #[test]
    fn any_bytes_are_answered_within_the_reply(
        requests in prop::collection::vec(
            (prop::collection::vec(any::<u8>(), 0..90), 0usize..600),
            1..40,
        ),
    ) {
        let mut rig = Rig::new();
        for (bytes, room) in requests {
            let mut reply = vec![0x5a; room];
            let used = rig.engine.handle(&bytes, &mut reply);
            prop_assert!(used <= room && used <= iommu_bounce::MAX_REPLY);
            prop_assert!(reply[used..].iter().all(|byte| *byte == 0x5a));
            prop_assert!(used == 0 || used >= 4);
        }
        rig.engine.reset();
        rig.check_empty();
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Replays the stored inputs of the fuzzer.

use iommu_bounce::test_utils::{fuzz, replay};

#[test]
fn stored_inputs_break_no_promise() {
    replay(concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/corpus/requests"), 50, fuzz::requests);
}

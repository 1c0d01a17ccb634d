// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Lives through what fuzzing has found worth keeping.

use std::fs;
use std::path::Path;

use iommu_bounce::test_utils::fuzz;

#[test]
fn stored_inputs_break_no_promise() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/requests");
    let mut count = 0;
    for entry in fs::read_dir(&corpus).expect("the corpus is there") {
        let data = fs::read(entry.expect("it can be listed").path()).expect("it can be read");
        fuzz::requests(&data);
        count += 1;
    }
    assert!(count >= 50, "only {count} inputs in {}", corpus.display());
}

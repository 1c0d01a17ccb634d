// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fuzz target that reads arbitrary bytes as the state of a snapshot. `README.md` in the parent directory explains how to run this target.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vmm::fuzzing::snapshot_state(data));

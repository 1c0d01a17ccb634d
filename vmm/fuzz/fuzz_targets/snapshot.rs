// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Reads arbitrary bytes as the state of a snapshot. `README.md` in this directory's parent explains how to run it.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vmm::fuzzing::snapshot_state(data));

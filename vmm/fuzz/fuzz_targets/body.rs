// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Sends an arbitrary body to every operation of the API that takes one. `README.md` in this directory's parent
//! explains how to run it.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vmm::fuzzing::body(data));

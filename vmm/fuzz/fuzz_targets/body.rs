// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fuzz target that sends an arbitrary body to every API operation that accepts a body. `README.md` in the parent directory explains how to
//! run this target.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| vmm::fuzzing::body(data));

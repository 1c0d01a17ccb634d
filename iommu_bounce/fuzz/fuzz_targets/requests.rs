// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fuzz target. The input contains encoded requests for the engine. The test host checks what the engine guarantees, and host calls may
//! fail. `fuzz/README.md` has the commands.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| iommu_bounce::test_utils::fuzz::requests(data));

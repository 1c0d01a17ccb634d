// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fuzz target. The input encodes requests and events for the engine. Calls to the simulated host may fail, and this host checks that the
//! engine keeps its rules. `fuzz/README.md` has the commands.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| iommu_bounce::test_utils::fuzz::requests(data));

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fuzz target for requests as bytes, on a host that checks the engine's promises and may fail. `fuzz/README.md` has the
//! commands.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| iommu_bounce::test_utils::fuzz::requests(data));

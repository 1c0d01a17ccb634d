// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The saved state of a virtio-iommu. `README.md` beside says how to run it.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| devices::virtio::iommu::fuzzing::state(data));

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fuzz target for restoring a virtio-iommu from a hostile saved state. `../README.md` explains how to run the target.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| devices::virtio::iommu::fuzzing::state(data));

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A virtio-iommu device with a hostile driver: registers, rings, requests. `README.md` beside says how to run it.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| devices::virtio::iommu::fuzzing::device(data));

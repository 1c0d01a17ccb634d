// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fuzz target for the registers, rings and requests of a virtio-iommu device, with a hostile driver. `../README.md` explains how to run
//! the target.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| devices::virtio::iommu::fuzzing::device(data));

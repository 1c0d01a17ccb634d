// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A hostile qcow2 image. `README.md` beside says how to run it.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| devices::virtio::block::fuzzing::image(data));

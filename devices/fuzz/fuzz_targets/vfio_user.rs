// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! vfio-user server that sends any bytes. `../README.md` explains how to run it.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| devices::vfio::user::fuzzing::server(data));

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Fuzz target for the vfio-user client, with a server that sends arbitrary bytes. `../README.md` explains how to run the target.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| devices::vfio::user::fuzzing::server(data));

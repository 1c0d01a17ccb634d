// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Registers of a watchdog, with a hostile driver. `../README.md` explains how to run it.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| devices::watchdog::fuzzing::run(data));

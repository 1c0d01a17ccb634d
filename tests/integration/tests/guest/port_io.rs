// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! I/O ports, as instructions reach them that ordinary drivers do not use.

use std::fs;

use carom_integration::Guest;
use carom_integration::harness::guest_test;

use crate::support::{SITE, run};

/// Line status of the serial port, which says that all was sent; the registers after it, modem status and scratch, say other things.
const LINE_STATUS: &str = "3fd";

#[guest_test]
fn string_instruction_reads_one_port_many_times() {
    let program = fs::read(SITE.string_io.as_ref().expect("CAROM_STRING_IO is set")).unwrap();
    let job = format!("sleep 0.5\nstring-io {LINE_STATUS} 3\n");

    let outcome = run(&Guest::new("string-io").memory_mib(512).program("string-io", program).job(&job));

    let bytes = outcome.value("CAROM-STRING-IO").expect("the program has printed");
    assert_eq!(bytes, "60 60 60", "console:\n{}", outcome.console);
}

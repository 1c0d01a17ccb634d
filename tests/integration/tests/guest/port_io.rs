// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! I/O ports, accessed by instructions that ordinary drivers do not use.

use std::process::Command;
use std::time::Duration;

use carom_integration::harness::guest_test;
use carom_integration::{Ended, Limits, run_limited};

use crate::support::SITE;

#[guest_test]
fn string_instruction_reads_one_port_many_times() {
    let logs = tempfile::tempdir().unwrap();
    let mut carom = Command::new(&SITE.carom);
    carom.arg("--kernel").arg(SITE.string_io.as_ref().expect("CAROM_STRING_IO is set"));
    carom.args(["--memory", "size=64M", "--serial", "tty", "--console", "off"]);
    let limits = Limits { time: Duration::from_secs(120), stop_on_panic: false };

    let finished = run_limited(&mut carom, &logs.path().join("console"), limits, None).unwrap();

    assert!(matches!(finished.ended, Ended::Exited(status) if status.success()), "{finished:?}");
    // All three reads must return the line status register (0x60: transmitter empty). The registers at the next two ports,
    // modem status and scratch, have other values.
    assert_eq!(finished.stdout, "\x60\x60\x60\n");
}

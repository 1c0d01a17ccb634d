// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests a real `carom` process with small guests that use as many host resources as they can. The cost to the host must stay limited, and
//! clients must be served.
//!
//! Without access to `/dev/kvm`, these tests do nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod echo_guest;
mod http;
#[expect(dead_code, reason = "shared by tests that start the program in another way")]
mod program;
mod tiny_guest;

use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, Instant};

use echo_guest::ECHO;
use program::{Carom, call, command, has_kvm, put, start_by, wait_until};
use tiny_guest::elf;

/// `ud2`, without an exception handler: a triple fault.
const RESET: &[u8] = &[0x0f, 0x0b];
/// Number of resets, and minimum time that all these resets together must take.
const RESETS: usize = 16;
const SLOWED: Duration = Duration::from_secs(4);

/// Starts a guest with `code`. The program logs to `log` and writes events to `events` in `dir`.
fn start(dir: &Path, code: &[u8]) -> Option<Carom> {
    if !has_kvm() {
        return None;
    }
    fs::write(dir.join("kernel"), elf(code)).unwrap();
    let [kernel, events] = ["kernel", "events"].map(|name| dir.join(name).display().to_string());
    let options = ["--kernel", &kernel, "--cpus", "boot=2", "--memory", "size=64M", "--serial", "null", "-v"];
    let mut command = command(dir, &options);
    command.args(["--event-monitor", &format!("path={events}")]).stderr(File::create(dir.join("log")).unwrap());
    Some(start_by(command, dir))
}

fn size(path: &Path) -> u64 {
    fs::metadata(path).unwrap().len()
}

/// Returns the number of occurrences of `event` in the event stream.
fn count(dir: &Path, event: &str) -> usize {
    fs::read_to_string(dir.join("events")).unwrap().matches(&format!("\"{event}\"")).count()
}

#[test]
fn guest_resets_in_a_loop_are_slowed_down_and_calls_served() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let start = Instant::now();
    let Some(_carom) = self::start(dir, RESET) else { return };
    wait_until("the guest resets itself again and again", || {
        assert_eq!(call(dir, "GET", "vm.info", None).0, 200);
        count(dir, "rebooted") >= RESETS
    });
    assert!(start.elapsed() >= SLOWED, "{} resets in {:?}", count(dir, "rebooted"), start.elapsed());
    let sizes = ["log", "events"].map(|name| size(&dir.join(name)));
    assert!(sizes.iter().all(|size| *size < 64 << 10), "{sizes:?}");
    // API calls succeed while a reset of the guest is delayed.
    ["vm.pause", "vm.resume", "vm.reboot", "vm.shutdown"].iter().for_each(|name| put(dir, name, None));
}

#[test]
fn sigterm_ends_a_guest_that_resets_or_runs_for_ever() {
    for (code, event) in [(RESET, "rebooted"), (ECHO, "booted")] {
        let dir = tempfile::tempdir().unwrap();
        let Some(mut carom) = start(dir.path(), code) else { return };
        wait_until("the guest runs", || count(dir.path(), event) > 0);
        assert!(carom.terminate().success());
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests the messages of a process that panics. Its standard error is a pipe that the test reads, or a full pipe.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use devices::crash;
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use vmm::process::log_stream;

/// Variable with the kind of panic: `once` or `abort`.
const HOW: &str = "CAROM_TEST_PANIC";
/// Variable with the file for crash reports.
const REPORT: &str = "CAROM_TEST_REPORT";

/// Time after which a hanging test fails.
const HUNG: Duration = Duration::from_secs(120);

/// Value that panics again while it is dropped, which aborts the process.
struct PanicsAgain;

impl Drop for PanicsAgain {
    fn drop(&mut self) {
        panic!("once more");
    }
}

/// Not a test by itself: the other tests start a process that runs only this function. Without [`HOW`], the function does nothing.
#[test]
fn process_that_panics() {
    let Ok(how) = std::env::var(HOW) else { return };
    let last_lines = log_stream::start().unwrap();
    crash::leave_reports_in(File::create(std::env::var_os(REPORT).unwrap()).unwrap()).unwrap();
    log_stream::complain("test", "said before");
    log_stream::start_threads().unwrap();
    let panicked = thread::Builder::new().name("worker".into()).spawn(move || {
        let _again = (how == "abort").then(|| PanicsAgain);
        panic!("the first");
    });
    assert!(panicked.unwrap().join().is_err());
    log_stream::complain("test", "said after");
    drop(last_lines);
}

fn command(how: &str, report: &std::path::Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "process_that_panics", "--nocapture", "--test-threads=1"]);
    command.env(HOW, how).env(REPORT, report).env_remove("RUST_BACKTRACE").stdout(Stdio::null());
    command
}

/// Returns the status of a panicking process, its standard error, and its report.
fn panic(how: &str) -> (ExitStatus, String, String) {
    let dir = tempfile::tempdir().unwrap();
    let report = dir.path().join("report");
    let output = command(how, &report).output().unwrap();
    (output.status, String::from_utf8(output.stderr).unwrap(), std::fs::read_to_string(report).unwrap())
}

#[test]
fn panic_message_is_in_order_with_other_lines() {
    let (status, said, report) = panic("once");
    assert!(status.success(), "{said}");
    let place = |text: &str| said.find(text).unwrap_or_else(|| panic!("no {text}: {said}"));
    assert!(place("said before\n") < place("thread 'worker' panicked at vmm/tests/panics.rs:"), "{said}");
    assert!(place(":\nthe first\n") < place("said after\n"), "{said}");
    assert!(report.contains("panics.rs:"));
}

#[test]
fn panic_that_aborts_has_its_message() {
    let (status, said, _) = panic("abort");
    assert_eq!(status.signal(), Some(libc::SIGABRT), "{said}");
    assert!(said.contains("the first\n") && said.contains("once more\n"), "{said}");
}

#[test]
fn panic_continues_without_a_reader() {
    let dir = tempfile::tempdir().unwrap();
    let report = dir.path().join("report");
    let (mut reader, mut writer) = io::pipe().unwrap();
    let flags = fcntl_getfl(&writer).unwrap();
    fcntl_setfl(&writer, flags | OFlags::NONBLOCK).unwrap();
    while writer.write(&[b'x'; 4096]).is_ok() {}
    while writer.write(b"x").is_ok() {}
    fcntl_setfl(&writer, flags).unwrap();
    let mut child = command("once", &report).stderr(writer).spawn().unwrap();
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > HUNG {
            child.kill().unwrap();
        }
        thread::sleep(Duration::from_millis(5));
    }
    assert!(child.wait().unwrap().success());
    assert!(std::fs::read_to_string(report).unwrap().contains("panics.rs:"));
    let mut all = String::new();
    reader.read_to_string(&mut all).unwrap();
    assert!(!all.contains("panicked"), "{all}");
}

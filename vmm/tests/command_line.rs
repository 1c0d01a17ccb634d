// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests that the exit status of a real `carom` process does not depend on the readers of its output.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::fs::File;
use std::io::pipe;
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};

/// Returns a pipe without a reader.
fn closed() -> OwnedFd {
    pipe().unwrap().1.into()
}

/// Opens a file that is always full.
fn full() -> OwnedFd {
    File::options().write(true).open("/dev/full").unwrap().into()
}

/// Runs the program with these output streams. Returns its exit status. Also returns its standard error if `stderr` is a pipe.
fn run(arguments: &[&str], stdout: Stdio, stderr: Stdio) -> (Option<i32>, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_carom"));
    let started = command.args(arguments).stdin(Stdio::null()).stdout(stdout).stderr(stderr).spawn().unwrap();
    let output = started.wait_with_output().unwrap();
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn help_to_a_closed_reader_is_not_a_failure() {
    for argument in ["--help", "--version"] {
        let (status, said) = run(&[argument], closed().into(), Stdio::piped());
        assert_eq!((status, said.as_str()), (Some(0), ""), "{argument}");
    }
}

#[test]
fn help_to_a_full_file_is_a_failure_of_one_line() {
    for argument in ["--help", "--version"] {
        let (status, said) = run(&[argument], full().into(), Stdio::piped());
        assert_eq!(status, Some(1), "{argument}: {said}");
        assert!(said.starts_with("carom: cannot write to standard output: No space left"), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

#[test]
fn mistake_has_status_2_for_any_reader_of_the_message() {
    let mistakes =
        [&["--nope"][..], &["--kernel", "/nonexistent"], &["--kernel", "k", "--memory", "size=1"], &["--tpm"]];
    for arguments in mistakes {
        for stderr in [closed(), full()] {
            assert_eq!(run(arguments, Stdio::null(), stderr.into()).0, Some(2), "{arguments:?}");
        }
    }
    // Both streams are full, and the log is on.
    let (status, _) = run(&["--kernel", "/nonexistent", "-vvv"], full().into(), full().into());
    assert_eq!(status, Some(2));
}

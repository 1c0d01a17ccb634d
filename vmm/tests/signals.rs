// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Sends a real `carom` process the signals that end a process by default.
//!
//! Without access to `/dev/kvm`, these tests do nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod http;
#[expect(dead_code, reason = "shared by tests that make other calls, too")]
mod program;

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};

use program::{Carom, call, start, start_by};
use vmm::process::signal_actions::is_ignored;

/// Signals that Carom ignores, in addition to the real-time signals.
const IGNORED: [i32; 7] =
    [libc::SIGXFSZ, libc::SIGPIPE, libc::SIGUSR2, libc::SIGVTALRM, libc::SIGPROF, libc::SIGIO, libc::SIGSTKFLT];
/// Signals that end the VM cleanly.
const ENDING: [i32; 6] = [libc::SIGHUP, libc::SIGINT, libc::SIGTERM, libc::SIGALRM, libc::SIGXCPU, libc::SIGPWR];
/// Signals that end the process immediately. All except SIGKILL cause a core dump, if the host enables core dumps.
const CORE: [i32; 8] = [
    libc::SIGQUIT,
    libc::SIGTRAP,
    libc::SIGILL,
    libc::SIGABRT,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGSEGV,
    libc::SIGKILL,
];
/// Signals that do not end a process by default, or that Carom itself uses (SIGUSR1, SIGSYS).
const OTHERS: [i32; 10] = [
    libc::SIGUSR1,
    libc::SIGSYS,
    libc::SIGWINCH,
    libc::SIGCHLD,
    libc::SIGCONT,
    libc::SIGSTOP,
    libc::SIGTSTP,
    libc::SIGTTIN,
    libc::SIGTTOU,
    libc::SIGURG,
];

fn send(carom: &Carom, signal: i32) {
    // Name the signal by its number, because real-time signals have no names.
    let status = Command::new("sh").args(["-c", &format!("kill -{signal} {}", carom.0.id())]).status().unwrap();
    assert!(status.success(), "{signal}");
}

/// Returns the set of signals in the line `name` of the process's `status` file in `/proc`.
fn mask(carom: &Carom, name: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", carom.0.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    u64::from_str_radix(line.trim(), 16).unwrap()
}

fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

#[test]
fn each_signal_is_in_one_class() {
    let real_time = libc::SIGRTMIN()..=libc::SIGRTMAX();
    let classes = IGNORED.into_iter().chain(ENDING).chain(CORE).chain(OTHERS).chain(real_time);
    let all = classes.fold(0, |all, signal| {
        assert_eq!(all & bit(signal), 0, "{signal} twice");
        all | bit(signal)
    });
    // The C library uses the signals 32 and 33.
    assert_eq!(!all, bit(32) | bit(33));
}

#[test]
fn signals_without_a_meaning_are_ignored() {
    let dir = tempfile::tempdir().unwrap();
    let Some(mut carom) = start(dir.path(), &[]) else { return };
    let real_time = libc::SIGRTMIN()..=libc::SIGRTMAX();
    for signal in IGNORED.into_iter().chain(real_time) {
        assert_ne!(mask(&carom, "SigIgn:") & bit(signal), 0, "{signal}");
        send(&carom, signal);
    }
    assert_eq!(call(dir.path(), "GET", "vmm.ping", None).0, 200);
    send(&carom, libc::SIGTERM);
    assert_eq!(carom.ended().code(), Some(0));
}

#[test]
fn ending_signals_end_the_process_cleanly() {
    for signal in ENDING {
        if signal == libc::SIGHUP && is_ignored(libc::SIGHUP) {
            // This test process ignores SIGHUP, for example because nohup started it. Carom would inherit the ignored signal, and SIGHUP
            // would not end Carom. So the test skips SIGHUP.
            continue;
        }
        let dir = tempfile::tempdir().unwrap();
        let events = dir.path().join("events");
        let monitor = format!("path={}", events.display());
        let Some(mut carom) = start(dir.path(), &["--event-monitor", &monitor]) else { return };
        send(&carom, signal);
        assert_eq!(carom.ended().code(), Some(0), "{signal}");
        assert!(fs::read_to_string(events).unwrap().contains(r#""event":"shutdown""#), "{signal}");
        assert!(!dir.path().join("api.sock").exists(), "{signal}");
    }
}

#[test]
fn signals_of_failures_end_the_process_at_once() {
    // Carom inherits ignored signals, so signals that this test process ignores are skipped. For example, a shell's background jobs ignore
    // SIGQUIT.
    for signal in CORE.into_iter().filter(|signal| !is_ignored(*signal)) {
        let dir = tempfile::tempdir().unwrap();
        let Some(mut carom) = start(dir.path(), &[]) else { return };
        send(&carom, signal);
        assert_eq!(carom.ended().signal(), Some(signal));
    }
}

/// Starts the program through `env` with this option, which changes the handling of signals.
fn start_by_env(dir: &Path, option: &str) -> Option<Carom> {
    let by_env = Command::new("env").args([option, "true"]).stderr(Stdio::null()).status();
    if !by_env.is_ok_and(|status| status.success()) {
        eprintln!("not tested: env does not support {option}");
        return None;
    }
    let mut command = Command::new("env");
    command.arg(option).arg(env!("CARGO_BIN_EXE_carom")).arg("-v").arg("--log-file").arg(dir.join("log"));
    command.arg("--api-socket").arg(dir.join("api.sock")).stdin(Stdio::null());
    Some(start_by(command, dir))
}

#[test]
fn program_that_nohup_starts_outlives_its_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let Some(mut carom) = start_by_env(dir.path(), "--ignore-signal=HUP") else { return };
    assert_ne!(mask(&carom, "SigIgn:") & bit(libc::SIGHUP), 0);
    send(&carom, libc::SIGHUP);
    send(&carom, libc::SIGTERM);
    assert_eq!(carom.ended().code(), Some(0));
    let log = fs::read_to_string(dir.path().join("log")).unwrap();
    assert!(log.contains("signal 15 ends the VMM") && !log.contains("signal 1 ends"), "{log}");
}

#[test]
fn signals_that_the_parent_blocked_are_unblocked() {
    let dir = tempfile::tempdir().unwrap();
    let Some(mut carom) = start_by_env(dir.path(), "--block-signal") else { return };
    assert_eq!(mask(&carom, "SigBlk:"), 0);
    send(&carom, libc::SIGTERM);
    assert_eq!(carom.ended().code(), Some(0));
}

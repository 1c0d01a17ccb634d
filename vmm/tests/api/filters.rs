// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! System call filters of a process that serves clients.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use super::http::LIMIT;
use super::{Carom, program};

/// Returns the number in the line `name` of a thread's `status` file. `task` is the thread's directory in `/proc`.
fn figure(task: &Path, name: &str) -> u32 {
    let status = fs::read_to_string(task.join("status")).unwrap();
    let value = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    value.unwrap().trim().parse().unwrap()
}

/// Starts the program with the option `--seccomp` set to `mode`. For each of its threads, returns the number of filters that the program
/// has added, and true if the thread has `no_new_privs`.
fn threads(mode: &str) -> Vec<(u32, bool)> {
    let mut command = program();
    command.args(["--seccomp", mode]);
    let carom = Carom::start_by(command, tempfile::tempdir().unwrap());
    assert_eq!(carom.request("GET", "vmm.ping", None).0, 200);
    let ours = figure(Path::new("/proc/self"), "Seccomp_filters");
    let look = || -> Vec<_> {
        let tasks =
            fs::read_dir(format!("/proc/{}/task", carom.child.id())).unwrap().map(|entry| entry.unwrap().path());
        tasks.map(|task| (figure(&task, "Seccomp_filters") - ours, figure(&task, "NoNewPrivs") == 1)).collect()
    };
    // The program filters its first thread only after the first clients are served.
    let start = Instant::now();
    while mode != "false" && look().iter().any(|(filters, _)| *filters == 0) && start.elapsed() < LIMIT {
        thread::sleep(Duration::from_millis(1));
    }
    look()
}

#[test]
fn every_thread_has_seccomp_filters_and_no_new_privileges() {
    for mode in ["true", "log", "errno"] {
        let threads = threads(mode);
        assert!(threads.len() >= 5, "{threads:?}");
        assert!(threads.iter().all(|(filters, given_up)| *filters > 0 && *given_up), "{mode}: {threads:?}");
    }
}

#[test]
fn without_seccomp_threads_still_give_up_new_privileges() {
    assert!(threads("false").iter().all(|(filters, given_up)| *filters == 0 && *given_up));
}

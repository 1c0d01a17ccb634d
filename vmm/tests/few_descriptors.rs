// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests a real `carom` process whose descriptor limit is too low for the configured size of bounce
//! windows.
//!
//! Without access to `/dev/kvm`, this test does nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod http;
mod program;
mod tiny_guest;

use std::fs;

use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::json;

use program::{put, start};
use tiny_guest::elf;

/// `again: hlt; jmp again`
const HALT: &[u8] = &[0xf4, 0xeb, 0xfd];

/// Boots a VM with windows of 512 MiB under this descriptor limit. Returns the log. Returns `None` without KVM.
fn log_within(limit: u64) -> Option<String> {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let log = dir.join("log");
    let mut carom = start(dir, &["--log-file", log.to_str().unwrap()])?;
    // The test sets the limit after the start, because the program raises its limit to the maximum when it starts.
    let pid = Pid::from_child(&carom.0);
    prlimit(Some(pid), Resource::Nofile, Rlimit { current: Some(limit), maximum: Some(limit) }).unwrap();
    fs::write(dir.join("kernel"), elf(HALT)).unwrap();
    let body = json!({"payload": {"kernel": dir.join("kernel")}, "memory": {"size": 64 << 20}, "serial": {"mode": "Null"},
        "rng": {"src": "/dev/urandom", "iommu": true}, "iommu_bounce": {"size": 512 << 20}});
    put(dir, "vm.create", Some(&body));
    put(dir, "vm.boot", None);
    // The log is complete when the program has ended.
    assert!(carom.terminate().success());
    Some(fs::read_to_string(log).unwrap())
}

#[test]
fn low_descriptor_limit_for_windows_logs_one_line() {
    let Some(log) = log_within(256) else { return };
    let lines: Vec<_> = log.lines().filter(|line| line.contains("iommu_bounce.max")).collect();
    let [line] = lines[..] else { panic!("{log}") };
    let reported = "windows of 512 MiB take up to 256 descriptors, and ";
    assert!(
        line.contains(reported) && line.contains("the limit of 256, of which 64 are reserved for the VMM"),
        "{line}"
    );
    assert!(line.contains("raise the limit to ") && line.contains("LimitNOFILE="), "{line}");
    let enough = log_within(1024).unwrap();
    assert!(!enough.contains("iommu_bounce.max"), "{enough}");
}

#[test]
fn descriptor_table_has_room_before_threads_start() {
    let dir = tempfile::tempdir().unwrap();
    let Some(carom) = start(dir.path(), &[]) else { return };
    let status = fs::read_to_string(format!("/proc/{}/status", carom.0.id())).unwrap();
    let size = status.lines().find_map(|line| line.strip_prefix("FDSize:")).unwrap();
    assert!(size.trim().parse::<u64>().unwrap() >= 1024, "{size}");
}

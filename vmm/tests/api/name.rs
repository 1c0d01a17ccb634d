// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the program started through a link named `cloud-hypervisor`.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::{Carom, program};

fn by_link(dir: &Path) -> Command {
    let link = dir.join("cloud-hypervisor");
    symlink(env!("CARGO_BIN_EXE_carom"), &link).unwrap();
    let mut command = Command::new(link);
    command.stdin(Stdio::null());
    command
}

#[test]
fn cloud_hypervisor_link_reports_the_api_version() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = by_link(dir.path());
    let version = command.arg("--version").output().unwrap();
    assert_eq!(String::from_utf8(version.stdout).unwrap(), "cloud-hypervisor v53.0\n");

    let mut command = Command::new(dir.path().join("cloud-hypervisor"));
    command.arg("-v").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    let carom = Carom::start_by(command, dir);
    let (status, ping) = carom.request("GET", "vmm.ping", None);
    assert_eq!((status, &ping["build_version"], &ping["version"]), (200, &json!("v53.0"), &json!("53.0.0")));
    assert_eq!(ping["pid"], carom.child.id());
}

#[test]
fn program_under_its_own_name_answers_with_its_own_version() {
    let carom = Carom::start();
    let (status, ping) = carom.request("GET", "vmm.ping", None);
    let version: &Value = &ping["version"];
    assert_eq!((status, version), (200, &json!(env!("CARGO_PKG_VERSION"))));
    assert_eq!(ping["build_version"], format!("carom {}", env!("CARGO_PKG_VERSION")));
}

#[test]
fn mistake_names_the_program_as_it_was_started() {
    let dir = tempfile::tempdir().unwrap();
    let output = by_link(dir.path()).args(["--kernel", "k", "--tpm", "socket=s"]).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(text.starts_with("cloud-hypervisor: --tpm is not supported"), "{text}");
}

#[test]
fn log_file_has_a_line_for_each_request() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let mut command = program();
    command.arg("-vv").arg("--log-file").arg(&log);
    let carom = Carom::start_by(command, dir);
    assert_eq!(carom.request("GET", "vmm.ping", None).0, 200);
    // A separate thread writes the log, so the line may appear only after the answer.
    let has_line = |text: &String| text.lines().any(|line| line.ends_with(" DEBUG] API: GET /api/v1/vmm.ping: 200 OK"));
    super::wait_for(|| fs::read_to_string(&log).ok().filter(has_line));
}

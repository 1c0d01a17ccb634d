// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of the file for crash reports (`--crash-report`).

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;

use rustix::process::{Pid, Signal, kill_process};

use super::{Carom, program};

/// Starts a process that writes its crash reports to a file in its directory. Returns the process, and the path of the file.
fn start() -> (Carom, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("crashes");
    let mut command = program();
    command.arg("--crash-report").arg(&file);
    (Carom::start_by(command, dir), file)
}

#[test]
fn crash_leaves_a_report_and_a_normal_end_leaves_no_file() {
    for signal in [Signal::SEGV, Signal::ABORT] {
        let (mut carom, file) = start();
        kill_process(Pid::from_child(&carom.child), signal).unwrap();
        assert_eq!(carom.wait().signal(), Some(signal.as_raw()));
        let report = fs::read_to_string(&file).unwrap();
        assert!(report.starts_with("report of a crash, form 1\nversion: carom "), "{report}");
        let pid = format!("\nprocess: {}, program at 0x", carom.child.id());
        assert!(report.contains(&pid) && report.contains(", which a process sent\n"), "{report}");
        assert!(report.ends_with("last requests to the virtio-iommu, oldest first:\nend of the report\n"), "{report}");

        // The next process does not change the report.
        let again = program().args(["--kernel", "/no/such", "--crash-report"]).arg(&file).output().unwrap();
        assert_eq!((again.status.code(), fs::read_to_string(&file).unwrap()), (Some(2), report));
    }
    let (mut carom, file) = start();
    assert!(file.exists());
    assert_eq!(carom.put("vmm.shutdown").0, 204);
    assert!(carom.wait().success() && !file.exists());
}

#[test]
fn crash_report_file_belongs_to_one_process() {
    let (_first, file) = start();
    let second = program().args(["--kernel", "/no/such", "--crash-report"]).arg(&file).output().unwrap();
    let text = String::from_utf8(second.stderr).unwrap();
    assert_eq!(second.status.code(), Some(2), "{text}");
    let expected = format!(
        "carom: --crash-report {}: another process writes its crash reports to this file: use another file\n",
        file.display()
    );
    assert!(text == expected && file.exists(), "{text}");
}

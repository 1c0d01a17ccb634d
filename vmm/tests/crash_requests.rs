// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests that crash reports contain the requests that a guest has sent to a disk.
//!
//! Without access to `/dev/kvm`, this test does nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod disk_guest;
mod guest_code;
mod http;
#[expect(dead_code, reason = "shared by tests that end the program by a signal")]
mod program;
mod tiny_guest;

use std::fs::{self, File};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use disk_guest::{IN, OUT, SECTOR, driver};
use program::{call, put, start, wait_until};
use tiny_guest::elf;

const SECRET: &[u8] = b"a secret of the guest's";

#[test]
fn crash_report_lists_disk_requests_without_their_data() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let report = dir.join("crashes");
    let Some(mut carom) = start(dir, &["--crash-report", report.to_str().unwrap()]) else { return };
    fs::write(dir.join("kernel"), elf(&driver([(IN, 3), (OUT, 5)], SECRET))).unwrap();
    let image = dir.join("image");
    File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let disk = json!({"path": image, "id": "victim", "pci_device_id": 2});
    let body = json!({"payload": {"kernel": dir.join("kernel")}, "memory": {"size": 64 << 20}, "disks": [disk],
        "serial": {"mode": "Null"}});
    put(dir, "vm.create", Some(&body));
    put(dir, "vm.boot", None);
    wait_until("both requests are served", || {
        let counters = &call(dir, "GET", "vm.counters", None).1["victim"];
        counters["read_ops"] == 1 && counters["write_ops"] == 1
    });
    // A counted request may not be complete yet. `vm.pause` waits until the request is complete.
    put(dir, "vm.pause", None);
    assert!(fs::read(&image).unwrap()[5 * SECTOR as usize..].starts_with(SECRET));

    kill_process(Pid::from_child(&carom.0), Signal::ABORT).unwrap();
    carom.ended();
    let report = fs::read(report).unwrap();
    assert!(!report.windows(6).any(|bytes| bytes == b"secret"));
    let expected = "\nlast requests to victim (virtio device 2), queue 0, oldest first:\n\
                    1 head=0 readable=16 writable=513 IN sector=3 status=0 used=513\n\
                    2 head=3 readable=528 writable=1 OUT sector=5 status=0 used=1\n\
                    end of the report\n";
    let report = String::from_utf8(report).unwrap();
    assert!(report.ends_with(expected), "{report}");
}

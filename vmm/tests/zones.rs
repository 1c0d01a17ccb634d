// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests RAM zones in a real `carom` process. A small guest writes to a zone that maps a file.
//!
//! Without access to `/dev/kvm`, these tests do nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod http;
#[expect(dead_code, reason = "shared by tests that end the program by a signal")]
mod program;
mod tiny_guest;

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;

use serde_json::json;

use program::{call, put, start, wait_until};
use tiny_guest::elf;

const MIB: u64 = 1 << 20;
/// Word that the guest writes at 96 MiB and at 160 MiB.
const WORD: u32 = 0x1234_5678;
/// `mov dword ptr [0x6000000], WORD; mov dword ptr [0xa000000], WORD; again: hlt; jmp again`
const WRITE: &[u8] = &[
    0xc7, 0x05, 0, 0, 0, 6, 0x78, 0x56, 0x34, 0x12, 0xc7, 0x05, 0, 0, 0, 0x0a, 0x78, 0x56, 0x34, 0x12, 0xf4, 0xeb, 0xfd,
];

fn word(file: &File, offset: u64) -> u32 {
    let mut word = [0; 4];
    file.read_exact_at(&mut word, offset).unwrap();
    u32::from_le_bytes(word)
}

#[test]
fn shared_zone_file_holds_guest_writes_and_restored_ram() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let Some(_carom) = start(dir, &[]) else { return };
    fs::write(dir.join("kernel"), elf(WRITE)).unwrap();
    let file = File::create_new(dir.join("ram")).unwrap();
    file.set_len(64 * MIB).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(dir.join("ram")).unwrap();
    let (kernel, ram) = (dir.join("kernel"), dir.join("ram"));
    // 96 MiB is in the second zone, 160 MiB in the third.
    let zones = json!([
        {"id": "low", "size": 64 * MIB, "reserve": true},
        {"id": "file", "size": 64 * MIB, "file": ram, "shared": true},
        {"id": "high", "size": 64 * MIB, "prefault": true},
    ]);
    let nodes = json!([{"guest_numa_id": 0, "cpus": [0], "memory_zones": ["low", "file"]},
        {"guest_numa_id": 1, "memory_zones": ["high"], "distances": [{"destination": 0, "distance": 30}]}]);
    let body = json!({"payload": {"kernel": kernel}, "memory": {"size": 0, "zones": zones}, "numa": nodes});
    put(dir, "vm.create", Some(&body));
    put(dir, "vm.boot", None);
    wait_until("the guest writes", || word(&file, 32 * MIB) == WORD);
    let reported = call(dir, "GET", "vm.info", None).1;
    assert_eq!(
        (&reported["config"]["memory"]["size"], &reported["memory_actual_size"]),
        (&json!(0), &json!(192 * MIB))
    );
    assert_eq!(reported["config"]["numa"][1]["distances"][0]["distance"], 30);
    let refused = call(dir, "PUT", "vm.resize", Some(&json!({"desired_ram": 320 * MIB})));
    assert_eq!(refused.0, 400, "{refused:?}");

    let url = format!("file://{}", dir.join("snapshot").display());
    put(dir, "vm.pause", None);
    put(dir, "vm.snapshot", Some(&json!({"destination_url": url})));
    put(dir, "vm.delete", None);
    // The restore must replace these bytes, both where the guest had written and where it had not.
    file.write_all_at(&[0xff; 8192], 32 * MIB).unwrap();
    for prefault in [false, true] {
        put(dir, "vm.restore", Some(&json!({"source_url": url, "prefault": prefault})));
        assert_eq!((word(&file, 32 * MIB), word(&file, 32 * MIB + 4096)), (WORD, 0));
        put(dir, "vm.resume", None);
        put(dir, "vm.reboot", None);
        put(dir, "vm.delete", None);
    }
    fs::remove_file(dir.join("ram")).unwrap();
    let (status, answer) = call(dir, "PUT", "vm.restore", Some(&json!({"source_url": url})));
    let rule = format!("memory.zones.file: {}: No such file or directory (os error 2)", dir.join("ram").display());
    assert_eq!((status, answer[0].as_str()), (400, Some(rule.as_str())));
}

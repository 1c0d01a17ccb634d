// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests snapshots of a VM with RAM hotplug, in a real `carom` process with a small guest. Some tests add RAM before the snapshot.
//!
//! Without access to `/dev/kvm`, these tests do nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod http;
#[expect(dead_code, reason = "shared by tests that end the program by a signal")]
mod program;
mod tiny_guest;

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use program::{call, put, start};
use tiny_guest::elf;

const MIB: u64 = 1 << 20;
/// Size of RAM at boot. This RAM fills all addresses for RAM below 4 GiB. So all further RAM lies above 4 GiB and raises the end of RAM.
const SIZE: u64 = 3072 * MIB;
/// `again: hlt; jmp again`
const HALT: &[u8] = &[0xf4, 0xeb, 0xfd];

/// Boots a guest that can get 512 MiB more RAM. `more` contains further fields of its configuration.
fn boot(dir: &Path, more: &Value) {
    fs::write(dir.join("kernel"), elf(HALT)).unwrap();
    // Holes of shared memory stay holes in the snapshot, so saving and restoring is fast.
    let memory = json!({"size": SIZE, "hotplug_size": 512 * MIB, "shared": true});
    let mut body = json!({"payload": {"kernel": dir.join("kernel")}, "memory": memory});
    body.as_object_mut().unwrap().append(&mut more.as_object().unwrap().clone());
    put(dir, "vm.create", Some(&body));
    put(dir, "vm.boot", None);
}

fn url(dir: &Path, name: &str) -> String {
    format!("file://{}", dir.join(name).display())
}

/// Saves the VM and restores it.
fn save_and_restore(dir: &Path, name: &str) {
    put(dir, "vm.pause", None);
    put(dir, "vm.snapshot", Some(&json!({"destination_url": url(dir, name)})));
    put(dir, "vm.delete", None);
    put(dir, "vm.restore", Some(&json!({"source_url": url(dir, name), "resume": true})));
}

#[test]
fn vm_with_high_windows_is_restored_after_ram_hotplug() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let Some(_carom) = start(dir, &[]) else { return };
    boot(dir, &json!({"rng": {"iommu": true}, "iommu_bounce": {"size": 16 * MIB, "aperture": "high"}}));
    put(dir, "vm.resize", Some(&json!({"desired_ram": SIZE + 128 * MIB})));
    save_and_restore(dir, "some");
    put(dir, "vm.reboot", None);
    put(dir, "vm.resize", Some(&json!({"desired_ram": SIZE + 512 * MIB})));
    save_and_restore(dir, "more");
    // At the next boot, the guest has all current RAM from the start.
    put(dir, "vm.shutdown", None);
    put(dir, "vm.boot", None);
    save_and_restore(dir, "all");
}

#[test]
fn snapshot_with_impossible_address_width_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let Some(_carom) = start(dir, &[]) else { return };
    boot(dir, &json!({}));
    put(dir, "vm.pause", None);
    put(dir, "vm.snapshot", Some(&json!({"destination_url": url(dir, "saved")})));
    put(dir, "vm.delete", None);
    let path = dir.join("saved/state.json");
    let mut state: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for entry in state["processors"]["vcpus"][0]["cpuid"].as_array_mut().unwrap() {
        if entry["function"] == 0x8000_0008_u32 {
            entry["eax"] = 8.into();
        }
    }
    fs::write(&path, state.to_string()).unwrap();

    let (status, answer) = call(dir, "PUT", "vm.restore", Some(&json!({"source_url": url(dir, "saved")})));

    let text = answer[0].as_str().unwrap_or_default();
    let rule = "cpuid: the guest's CPU has physical addresses of 8 bits, but the minimum is 36: restore from an unmodified snapshot";
    assert!(status == 400 && text.contains("vCPU 0") && text.ends_with(rule), "{status} {answer}");
    assert_eq!(call(dir, "GET", "vm.info", None).0, 404, "no VM is left");
}

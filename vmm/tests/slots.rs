// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests the PCI slots that a configuration assigns to devices, in a real `carom` process with a small guest.
//!
//! Without access to `/dev/kvm`, these tests do nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod http;
#[expect(dead_code, reason = "shared by tests that end the program by a signal")]
mod program;
mod tiny_guest;

use std::fs::{self, File};
use std::path::Path;

use serde_json::{Value, json};

use program::{call, put, start};
use tiny_guest::elf;

/// `again: hlt; jmp again`
const HALT: &[u8] = &[0xf4, 0xeb, 0xfd];

/// Returns the address of the device with this ID.
fn address(dir: &Path, id: &str) -> String {
    let info = call(dir, "GET", "vm.info", None).1;
    info["device_tree"][id]["pci_bdf"].as_str().unwrap_or_default().into()
}

fn disk(dir: &Path, id: &str) -> Value {
    let path = dir.join(id);
    File::create(&path).unwrap().set_len(1 << 20).unwrap();
    json!({"path": path, "id": id})
}

fn in_slot(mut device: Value, slot: u8) -> Value {
    device["pci_device_id"] = slot.into();
    device
}

#[test]
fn devices_get_their_configured_slots_and_conflicts_fail() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let Some(_carom) = start(dir, &[]) else { return };
    fs::write(dir.join("kernel"), elf(HALT)).unwrap();
    let disks = json!([disk(dir, "first"), in_slot(disk(dir, "fixed"), 3), disk(dir, "next")]);
    let body = json!({"payload": {"kernel": dir.join("kernel")}, "memory": {"size": 64 << 20}, "disks": disks,
        "rng": {"src": "/dev/urandom", "id": "dice", "pci_device_id": 31}});
    put(dir, "vm.create", Some(&body));
    put(dir, "vm.boot", None);
    let all = || ["first", "fixed", "next", "dice"].map(|id| address(dir, id));
    let wanted = ["0000:00:02.0", "0000:00:03.0", "0000:00:04.0", "0000:00:1f.0"];
    assert_eq!(all(), wanted);

    for (slot, rule) in [
        (3, "3 is given twice: use another value for one of the two devices"),
        (4, "slot 4 on segment 0 is taken: choose another slot"),
    ] {
        let taken = call(dir, "PUT", "vm.add-disk", Some(&in_slot(disk(dir, "late"), slot)));
        assert_eq!(taken, (409, json!([format!("disks.pci_device_id: {rule}")])));
    }
    let added = call(dir, "PUT", "vm.add-disk", Some(&in_slot(disk(dir, "late"), 30)));
    assert_eq!(added, (200, json!({"id": "late", "bdf": "0000:00:1e.0"})));
    assert_eq!(call(dir, "PUT", "vm.add-disk", Some(&in_slot(disk(dir, "none"), 32))).0, 400);

    let url = format!("file://{}", dir.join("snapshot").display());
    put(dir, "vm.pause", None);
    put(dir, "vm.snapshot", Some(&json!({"destination_url": url})));
    put(dir, "vm.delete", None);
    put(dir, "vm.restore", Some(&json!({"source_url": url, "resume": true})));
    assert_eq!((all(), address(dir, "late")), (wanted.map(String::from), "0000:00:1e.0".into()));
    put(dir, "vm.delete", None);

    // With a virtio-iommu, some slots are behind the virtio-iommu, and the other slots are not.
    let behind = json!({"payload": {"kernel": dir.join("kernel")}, "memory": {"size": 64 << 20}, "rng": {"iommu": true},
        "disks": [in_slot(disk(dir, "fixed"), 17)]});
    put(dir, "vm.create", Some(&behind));
    let rule =
        "disks.pci_device_id: 17 is not allowed: on segment 0, the slots not behind the virtio-iommu are 18 to 31";
    assert_eq!(call(dir, "PUT", "vm.boot", None), (400, json!([rule])));
}

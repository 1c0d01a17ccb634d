// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests the VM Generation ID in a real `carom` process. The tests save and restore a VM with the guest `generation_guest/guest.c`.
//!
//! Without access to `/dev/kvm` or without a compiler, these tests do nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod c_guest;
mod http;
#[expect(dead_code, reason = "shared by tests that end the program by a signal")]
mod program;
mod tiny_guest;

use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};

use program::{Carom, call, put, start, wait_until};

/// VM Generation ID and number of notifications, from a line that the guest printed.
type Seen = (String, u8);

struct Guest {
    dir: tempfile::TempDir,
    _carom: Carom,
}

impl Guest {
    fn start(options: &[&str]) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let kernel = c_guest::build("generation_guest", &[], dir.path())?.display().to_string();
        let serial = format!("file={}", dir.path().join("serial").display());
        let mut all = vec!["--memory", "size=32M", "--kernel", &kernel, "--serial", &serial];
        all.extend(options);
        let carom = start(dir.path(), &all)?;
        Some(Self { dir, _carom: carom })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn put(&self, name: &str, body: Option<&Value>) {
        put(self.dir.path(), name, body);
    }

    /// Returns all complete lines that were printed since the serial port was opened. Omits a first line that began earlier.
    fn lines(&self) -> Vec<Seen> {
        let text = fs::read_to_string(self.path("serial")).unwrap_or_default();
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        let parse = |line: &str| Some((line.get(..32)?.to_string(), u8::from_str_radix(line.get(33..35)?, 16).ok()?));
        whole.lines().filter_map(parse).collect()
    }

    /// Waits until the guest has printed three more lines that satisfy `wanted`. Returns the last line.
    fn sees(&self, what: &str, wanted: impl Fn(&Seen) -> bool) -> Seen {
        let before = self.lines().len();
        let is_so = || self.lines().iter().skip(before).filter(|seen| wanted(seen)).count() > 2;
        wait_until(what, is_so);
        self.lines().pop().unwrap()
    }

    fn save(&self) {
        let url = format!("file://{}", self.path("snapshot").display());
        self.put("vm.pause", None);
        self.put("vm.snapshot", Some(&json!({"destination_url": url})));
    }

    /// Deletes the VM, then restores and resumes the saved VM.
    fn restore(&self) {
        self.put("vm.delete", None);
        let url = format!("file://{}", self.path("snapshot").display());
        self.put("vm.restore", Some(&json!({"source_url": url, "resume": true})));
    }

    /// Changes a file of the snapshot.
    fn change(&self, name: &str, change: impl FnOnce(&mut Value)) {
        let path = self.path("snapshot").join(name);
        let mut value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        change(&mut value);
        fs::write(path, value.to_string()).unwrap();
    }
}

fn is_set(id: &str) -> bool {
    id.bytes().any(|digit| digit != b'0')
}

#[test]
fn each_restore_has_a_new_id_and_one_notice() {
    let Some(guest) = Guest::start(&[]) else { return };
    let (id, notices) = guest.sees("the guest runs", |_| true);
    assert!(is_set(&id) && notices == 0, "{id}, {notices} notices");
    guest.put("vm.pause", None);
    guest.put("vm.resume", None);
    assert_eq!(guest.sees("the guest continues", |_| true), (id.clone(), 0));
    guest.put("vm.reboot", None);
    assert_eq!(guest.sees("the guest runs again", |seen| seen.1 == 0), (id.clone(), 0));
    guest.save();
    let mut ids = vec![id];
    for _ in 0..2 {
        guest.restore();
        let (id, notices) = guest.sees("the guest was notified", |seen| seen.1 != 0);
        assert_eq!(notices, 1);
        ids.push(id);
    }
    let last = ids[2].clone();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 3, "{ids:?}");
    // A pause or a reboot does not change the restored VM's ID.
    guest.put("vm.pause", None);
    guest.put("vm.resume", None);
    assert_eq!(guest.sees("the guest continues", |_| true), (last.clone(), 1));
    guest.put("vm.reboot", None);
    assert_eq!(guest.sees("the guest runs again", |seen| seen.1 == 0), (last, 0));
}

#[test]
fn restored_vm_that_is_saved_before_it_runs_notifies_once() {
    let Some(guest) = Guest::start(&[]) else { return };
    let (first, _) = guest.sees("the guest runs", |_| true);
    guest.save();
    guest.put("vm.delete", None);
    let url = format!("file://{}", guest.path("snapshot").display());
    guest.put("vm.restore", Some(&json!({"source_url": url})));
    let again = format!("file://{}", guest.path("again").display());
    guest.put("vm.snapshot", Some(&json!({"destination_url": again})));
    guest.put("vm.delete", None);
    guest.put("vm.restore", Some(&json!({"source_url": again, "resume": true})));
    let (id, notices) = guest.sees("the guest was notified", |seen| seen.1 != 0);
    assert!(id != first && notices == 1, "{id}, {notices} notices");
}

#[test]
fn snapshot_without_the_device_is_restored_without_it() {
    let Some(guest) = Guest::start(&[]) else { return };
    let (id, _) = guest.sees("the guest runs", |_| true);
    guest.save();
    // Imitate a snapshot of an earlier version, which had neither field.
    let remove = |value: &mut Value, name: &str| assert!(value.as_object_mut().unwrap().remove(name).is_some());
    guest.change("state.json", |state| remove(state, "generation_id"));
    guest.change("config.json", |config| remove(&mut config["platform"], "vmgenid"));
    guest.restore();
    assert_eq!(guest.sees("the guest continues", |_| true), (id.clone(), 0));
    fs::remove_dir_all(guest.path("snapshot")).unwrap();
    guest.save();
    guest.change("state.json", |state| assert_eq!(state.get("generation_id"), None));
    // The guest gets the device when it boots with this version's tables.
    guest.put("vm.reboot", None);
    let (new, notices) = guest.sees("the guest has its own ID", |seen| seen.0 != id);
    assert!(is_set(&new) && notices == 0, "{new}, {notices} notices");
}

#[test]
fn snapshot_with_a_wrong_generation_id_is_refused() {
    let Some(guest) = Guest::start(&[]) else { return };
    guest.sees("the guest runs", |_| true);
    guest.save();
    guest.put("vm.delete", None);
    let url = format!("file://{}", guest.path("snapshot").display());
    let refusal = || call(guest.dir.path(), "PUT", "vm.restore", Some(&json!({"source_url": url})));
    for (address, rule) in [
        (json!(0x1000), "generation_id: the saved address is 0x1000, but this version supports only 0xf1000"),
        (
            json!(0xf1000),
            "generation_id: the saved VM has a VM Generation ID, but platform.vmgenid is off: turn vmgenid on",
        ),
    ] {
        guest.change("config.json", |config| config["platform"]["vmgenid"] = json!(address != json!(0xf1000)));
        guest.change("state.json", |state| state["generation_id"] = address);
        let (status, answer) = refusal();
        assert!(status == 400 && answer[0].as_str().unwrap().contains(rule), "{status} {answer}");
    }
}

#[test]
fn guest_without_generation_id_has_none() {
    let Some(guest) = Guest::start(&["--platform", "vmgenid=off"]) else { return };
    assert_eq!(guest.sees("the guest runs", |_| true), ("0".repeat(32), 0));
    guest.save();
    guest.change("state.json", |state| assert_eq!(state.get("generation_id"), None));
    guest.restore();
    assert_eq!(guest.sees("the guest continues", |_| true), ("0".repeat(32), 0));
}

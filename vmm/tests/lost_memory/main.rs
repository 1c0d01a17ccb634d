// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests a real `carom` process whose host loses guest memory, because a file was truncated or a file system is full. The VM stops with a
//! reason that names the zone or device and the file, and its guest does not continue.
//!
//! Without access to `/dev/kvm`, these tests do nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod guest;
#[path = "../guest_code/mod.rs"]
mod guest_code;
#[path = "../http/mod.rs"]
mod http;
#[path = "../program/mod.rs"]
#[expect(dead_code, reason = "shared by tests that end the program by a signal")]
mod program;
#[path = "../tiny_guest/mod.rs"]
mod tiny_guest;

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{Mode, OFlags, open};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, tcgetattr};
use serde_json::{Value, json};

use guest::{AFTER, GO, LOST, READY, SHOWN, ZONE};
use guest_code::{CONFIG, Code};
use program::{Carom, call, command, has_kvm, put, start, start_by, wait_until};
use tiny_guest::elf;

const MIB: u64 = 1 << 20;
/// Page of the first zone that the guest's driver and the disk share. The addresses below are in this page.
const PAGE: u32 = 0x31_0000;
const HEADER: u32 = PAGE + 0x600;
const STATUS: u32 = PAGE + 0x700;
const BUFFER: u32 = PAGE + 0x800;
const SECTOR: u32 = 512;

/// VM whose two zones are files.
struct Vm {
    dir: PathBuf,
    carom: Carom,
    low: File,
    lost: PathBuf,
}

/// Creates a file of `len` bytes without data.
fn sparse(path: &Path, len: u64) -> File {
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path).unwrap();
    file.set_len(len).unwrap();
    file
}

impl Vm {
    /// Boots a guest of `code`, with the second zone in `lost`, after `prepare` has written to the zones. Returns when the guest is
    /// ready.
    fn boot(dir: &Path, lost: &Path, code: Vec<u8>, more: &Value, prepare: impl FnOnce(&File, &File)) -> Option<Self> {
        Self::boot_with(dir, lost, code, more, &[], prepare)
    }

    fn boot_with(
        dir: &Path,
        lost: &Path,
        code: Vec<u8>,
        more: &Value,
        options: &[&str],
        prepare: impl FnOnce(&File, &File),
    ) -> Option<Self> {
        let events = dir.join("events");
        let monitor = format!("path={}", events.display());
        let carom = start(dir, &[&["--event-monitor", &monitor], options].concat())?;
        let low = sparse(&dir.join("low"), ZONE.into());
        prepare(&low, &sparse(lost, 64 * MIB));
        fs::write(dir.join("kernel"), elf(&code)).unwrap();
        let zones = json!([
            {"id": "low", "size": ZONE, "file": dir.join("low"), "shared": true},
            {"id": "lost", "size": 64 * MIB, "file": lost, "shared": true},
        ]);
        let mut body = json!({"payload": {"kernel": dir.join("kernel")}, "memory": {"size": 0, "zones": zones},
            "serial": {"mode": "Null"}});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        put(dir, "vm.create", Some(&body));
        put(dir, "vm.boot", None);
        let vm = Self { dir: dir.into(), carom, low, lost: lost.into() };
        wait_until("the guest is ready", || vm.word(READY) == 1);
        Some(vm)
    }

    /// Returns a word of the first zone.
    fn word(&self, address: u32) -> u32 {
        let mut word = [0; 4];
        self.low.read_exact_at(&mut word, address.into()).unwrap();
        u32::from_le_bytes(word)
    }

    fn go(&self) {
        self.low.write_all_at(&1u32.to_le_bytes(), GO.into()).unwrap();
    }

    /// Waits until the program has failed. Checks that the reason in the event contains all of `parts`.
    fn fails(&mut self, parts: &[&str]) {
        assert_eq!(self.carom.ended().code(), Some(1));
        assert_reason(&reason(&self.dir).unwrap(), parts);
    }
}

/// Returns the reason in the event `vm:failed`, if it was written.
fn reason(dir: &Path) -> Option<String> {
    let events = fs::read_to_string(dir.join("events")).unwrap();
    let events = events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let mut failed = events.filter(|event| event["source"] == "vm" && event["event"] == "failed");
    failed.next().map(|event| event["properties"]["reason"].as_str().unwrap().into())
}

fn assert_reason(reason: &str, parts: &[&str]) {
    for part in parts {
        assert!(reason.contains(part), "{part}: {reason}");
    }
}

fn truncate(path: &Path) {
    OpenOptions::new().write(true).open(path).unwrap().set_len(0).unwrap();
}

/// Returns code for accesses to the lost page. The CPU executes two of the accesses, and KVM emulates the other two.
fn accesses() -> [(&'static str, Code); 4] {
    let start = || Code::default().wait();
    [
        ("store", start().store(LOST, 4, 5)),
        ("load", start().load(LOST)),
        ("copy from a register", start().copy(CONFIG, LOST)),
        ("copy to a register", start().copy(LOST, CONFIG)),
    ]
}

#[test]
fn guest_in_a_truncated_zone_does_not_run_on() {
    for (what, code) in accesses() {
        let dir = tempfile::tempdir().unwrap();
        let lost = dir.path().join("lost");
        let Some(mut vm) = Vm::boot(dir.path(), &lost, code.end(), &json!({}), |_, _| {}) else { return };
        truncate(&vm.lost);
        vm.go();
        let file = format!("file {}", lost.display());
        vm.fails(&["zone 'lost'", &file, "offset 0x100000 (guest-physical 0x4100000)"]);
        assert_eq!(vm.word(AFTER), 0, "{what}");
    }
}

#[test]
fn triple_fault_of_a_guest_with_lost_memory_is_not_a_reset() {
    let dir = tempfile::tempdir().unwrap();
    let lost = dir.path().join("lost");
    let code = Code::default().wait().triple_fault().end();
    let Some(mut vm) = Vm::boot(dir.path(), &lost, code, &json!({}), |_, _| {}) else { return };
    truncate(&vm.lost);
    vm.go();
    vm.fails(&[
        "triple fault; likely cause: the host cannot supply guest memory",
        "zone 'lost'",
        &format!("file {}", lost.display()),
    ]);
    assert_eq!(vm.word(AFTER), 0);
}

/// Small file system that is full. Dropping this value unmounts the file system.
struct FullFileSystem(PathBuf);

impl FullFileSystem {
    /// Mounts the file system. Returns `None` if this process may not mount it.
    fn mount(place: PathBuf) -> Option<Self> {
        fs::create_dir(&place).unwrap();
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=1M", "none"]).arg(&place).output();
        if !mounted.as_ref().is_ok_and(|output| output.status.success()) {
            eprintln!("not tested: mounting a file system needs root: {mounted:?}");
            return None;
        }
        let system = Self(place);
        let mut filler = File::create(system.filler()).unwrap();
        while filler.write_all(&[1; 4096]).is_ok() {}
        Some(system)
    }

    fn filler(&self) -> PathBuf {
        self.0.join("filler")
    }
}

impl Drop for FullFileSystem {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn zone_on_a_full_file_system_stops_the_vm_and_the_api_answers() {
    // The guest makes two accesses: the CPU executes one access, and KVM emulates the other.
    for (what, code) in accesses().into_iter().step_by(3) {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let Some(system) = FullFileSystem::mount(dir.join("full")) else { return };
        let lost = system.0.join("ram");
        let Some(vm) = Vm::boot_with(dir, &lost, code.end(), &json!({}), &["--no-shutdown"], |_, _| {}) else { return };
        vm.go();
        wait_until("the event has a reason", || reason(dir).is_some());
        let file = format!("file {}", lost.display());
        let parts =
            ["zone 'lost'", &file, "offset 0x100000 (guest-physical 0x4100000)", "its file system has free space"];
        assert_reason(&reason(dir).unwrap(), &parts);
        let info = || call(dir, "GET", "vm.info", None).1;
        wait_until("the VM is shut down", || info()["state"] == "Created");
        assert_eq!((info()["failure"].as_str(), vm.word(AFTER)), (reason(dir).as_deref(), 0), "{what}");

        fs::remove_file(system.filler()).unwrap();
        put(dir, "vm.boot", None);
        wait_until("the guest runs on", || vm.word(AFTER) == 1);
        assert_eq!(info()["failure"], Value::Null);
    }
}

#[test]
fn guest_in_truncated_persistent_memory_does_not_run_on() {
    // Values for the command register and for the 64-bit BAR 2.
    let show = [(4, 0), (0x18, SHOWN), (0x1c, 0), (4, 2)];
    let show = show.into_iter().fold(Code::default(), |code, (at, value)| code.store(CONFIG + at, 4, value));
    let show = || show.clone().store(SHOWN + 0x10_0000, 4, 7).wait();
    let (page, other) = (SHOWN + 0x10_0000, SHOWN + 0x10_1000);
    for code in [show().load(page), show().copy(CONFIG, other)] {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        let file = sparse(&image, 2 * MIB);
        let pmem = json!({"pmem": [{"file": image, "id": "store", "pci_device_id": 2}]});
        let Some(mut vm) = Vm::boot(dir.path(), &dir.path().join("lost"), code.end(), &pmem, |_, _| {}) else { return };
        let mut word = [0; 4];
        file.read_exact_at(&mut word, MIB).unwrap();
        assert_eq!(word, [7, 0, 0, 0], "the guest's write is in the file");
        truncate(&image);
        vm.go();
        vm.fails(&["persistent memory 'store'", &format!("file {}", image.display()), "offset 0x10"]);
        assert_eq!(vm.word(AFTER), 0);
    }
}

#[test]
fn triple_fault_with_a_full_file_system_is_a_reset() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let Some(system) = FullFileSystem::mount(dir.join("full")) else { return };
    // `inc dword [AFTER]`, then a triple fault if the word is 1. So the guest is reset once.
    let mut code = vec![0xff, 0x05];
    code.extend(AFTER.to_le_bytes());
    code.extend([0x83, 0x3d]);
    code.extend(AFTER.to_le_bytes());
    code.extend([1, 0x75, 2, 0x0f, 0x0b]);
    code.extend(Code::default().wait().end());
    let lost = system.0.join("ram");
    let Some(vm) = Vm::boot_with(dir, &lost, code, &json!({}), &[], |_, _| {}) else { return };
    assert_eq!((vm.word(AFTER), reason(dir)), (2, None));
}

/// Restores a VM with private RAM from a snapshot in `dir`, and then truncates the snapshot's memory file. Returns the VM, which is paused.
fn restored(dir: &Path) -> Option<Vm> {
    restored_with(dir, "Null", Stdio::null())
}

/// Like [`restored`], with this mode of the serial port and this standard input.
fn restored_with(dir: &Path, serial: &str, input: Stdio) -> Option<Vm> {
    let monitor = format!("path={}", dir.join("events").display());
    if !has_kvm() {
        return None;
    }
    let mut command = command(dir, &["--event-monitor", &monitor]);
    command.stdin(input);
    let carom = start_by(command, dir);
    // `again: inc dword [READY]; jmp again`
    let mut code = vec![0xff, 0x05];
    code.extend(READY.to_le_bytes());
    code.extend([0xeb, 0xf8]);
    fs::write(dir.join("kernel"), elf(&code)).unwrap();
    let body =
        json!({"payload": {"kernel": dir.join("kernel")}, "memory": {"size": 64 * MIB}, "serial": {"mode": serial}});
    put(dir, "vm.create", Some(&body));
    put(dir, "vm.boot", None);
    put(dir, "vm.pause", None);
    let url = format!("file://{}", dir.join("snapshot").display());
    put(dir, "vm.snapshot", Some(&json!({"destination_url": url})));
    put(dir, "vm.delete", None);
    put(dir, "vm.restore", Some(&json!({"source_url": url})));
    truncate(&dir.join("snapshot/memory-ranges"));
    Some(Vm { dir: dir.into(), carom, low: tempfile::tempfile().unwrap(), lost: PathBuf::new() })
}

#[test]
fn restored_vm_ends_when_its_snapshot_is_truncated() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let Some(mut vm) = restored(dir) else { return };
    put(dir, "vm.resume", None);
    vm.fails(&["zone 'mem0'", &format!("file {}", dir.join("snapshot/memory-ranges").display())]);
}

#[test]
fn vmm_ends_when_its_control_thread_accesses_lost_memory() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let Some(mut vm) = restored(dir) else { return };
    let url = format!("file://{}", dir.join("again").display());
    let mut client = http::connect(&dir.join("api.sock"));
    http::send(&mut client, "PUT", "vm.snapshot", Some(&json!({"destination_url": url})));
    vm.fails(&["zone 'mem0'", &format!("file {}", dir.join("snapshot/memory-ranges").display())]);
}

#[test]
fn vmm_that_ends_at_once_restores_the_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&terminal).unwrap();
    unlockpt(&terminal).unwrap();
    let path = ptsname(&terminal, Vec::new()).unwrap().into_string().unwrap();
    let user = File::from(open(path, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty()).unwrap());
    let is_raw = || !tcgetattr(&user).unwrap().local_modes.contains(LocalModes::ICANON);
    assert!(!is_raw());
    let Some(mut vm) = restored_with(dir, "Tty", user.try_clone().unwrap().into()) else { return };
    assert!(is_raw());
    let url = format!("file://{}", dir.join("again").display());
    let mut client = http::connect(&dir.join("api.sock"));
    http::send(&mut client, "PUT", "vm.snapshot", Some(&json!({"destination_url": url})));
    assert_eq!(vm.carom.ended().code(), Some(1));
    assert!(!is_raw());
}

/// Writes a disk request. The descriptors and the available ring are written to `rings`, which is a file and an offset. The header is
/// written to `low`. The data are at `buffer`.
fn write_request(rings: (&File, u64), low: &File, writes: bool, buffer: u32, available: u16) {
    let (file, offset) = rings;
    let buffers = [(HEADER, 16, 1u16), (buffer, SECTOR, if writes { 1 } else { 3 }), (STATUS, 1, 2)];
    for (index, (place, len, flags)) in (0u16..).zip(buffers) {
        let mut descriptor = u64::from(place).to_le_bytes().to_vec();
        descriptor.extend(len.to_le_bytes());
        descriptor.extend(flags.to_le_bytes());
        descriptor.extend((index + 1).to_le_bytes());
        file.write_all_at(&descriptor, offset + 16 * u64::from(index)).unwrap();
    }
    file.write_all_at(&available.to_le_bytes(), offset + 0x202).unwrap();
    low.write_all_at(&u32::from(writes).to_le_bytes(), HEADER.into()).unwrap();
}

fn disk(dir: &Path) -> Value {
    let image = dir.join("image");
    sparse(&image, MIB);
    json!({"disks": [{"path": image, "id": "disk", "pci_device_id": 2}]})
}

#[test]
fn queue_in_truncated_memory_ends_the_vmm_with_a_report() {
    let code = Code::default().set_up_disk([LOST, LOST + 0x200, LOST + 0x400]).wait().notify_disk();
    let dir = tempfile::tempdir().unwrap();
    let (dir, report) = (dir.path(), dir.path().join("crashes"));
    let lost = dir.join("lost");
    // The program ends even with --no-shutdown, because a thread of the program is stuck.
    let options = ["--no-shutdown", "--crash-report", report.to_str().unwrap()];
    let prepare = |low: &File, lost: &File| write_request((lost, (LOST - ZONE).into()), low, false, BUFFER, 0);
    let Some(mut vm) = Vm::boot_with(dir, &lost, code.end(), &disk(dir), &options, prepare) else { return };
    truncate(&lost);
    vm.go();
    let name = format!("zone 'lost', file {}", lost.display());
    vm.fails(&[&name, "offset 0x100"]);
    let report = fs::read_to_string(report).unwrap();
    assert!(report.contains("thread: disk_q0 (role block)\n"), "{report}");
    assert!(report.contains(&format!("cause: lost guest memory: {name}, offset 0x100")), "{report}");
}

#[test]
fn disk_whose_buffer_is_in_truncated_memory_stops_the_vm() {
    for writes in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let lost = dir.join("lost");
        let code = Code::default().wait().set_up_disk([PAGE, PAGE + 0x200, PAGE + 0x400]).notify_disk();
        let prepare = |low: &File, _: &File| write_request((low, PAGE.into()), low, writes, LOST, 1);
        let Some(mut vm) = Vm::boot(dir, &lost, code.end(), &disk(dir), prepare) else { return };
        truncate(&lost);
        vm.go();
        vm.fails(&["zone 'lost'", &format!("file {}", lost.display()), "offset 0x100000"]);
    }
}

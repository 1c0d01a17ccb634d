// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests the API calls that Kata Containers' Go client makes to Cloud Hypervisor.
//!
//! `CAROM_KATA_CLIENT` names the program that is built from `driver.go` and Kata's Go client (`docs/kata.md`). Without this variable, the
//! tests send recorded requests of the client. With `CAROM_BLESS=1`, the tests record the client's requests. Without access to `/dev/kvm`,
//! these tests do nothing. The guest test of the same name tests network devices, whose requests carry descriptors.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../recorded/mod.rs"]
mod recorded;

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use recorded::{Vmm, check_sent, client, pass_on};

/// Placeholder for the test's directory in recorded requests.
const DIRECTORY: &str = "/tmp/carom-kata-XXXXXX";

/// Call, status of its answer, and expected parts of the answer.
type Step = (&'static str, u16, &'static [&'static str]);

/// Calls in the life of a sandbox, in the runtime's order.
static STEPS: &[Step] = &[
    ("ping", 200, &["\"version\":"]),
    ("create", 204, &[]),
    ("info", 200, &["\"state\":\"Created\"", "\"num_pci_segments\":2"]),
    ("boot", 204, &[]),
    ("info", 200, &["\"state\":\"Running\"", "\"_host_bridge1\"", "\"0001:00:00.0\""]),
    ("add-disk", 200, &["\"id\":\"_disk0\"", "\"bdf\":\"0000:00:"]),
    ("add-device=/sys/bus/pci/devices/0000:ff:1f.7", 400, &["0000:ff:1f.7"]),
    ("info", 200, &["\"size\":268435456", "\"hotplug_size\":1073741824"]),
    ("resize-memory", 204, &[]),
    ("info", 200, &["\"boot_vcpus\":1", "\"max_vcpus\":2"]),
    ("resize-vcpus", 204, &[]),
    ("info", 200, &["\"boot_vcpus\":2"]),
    ("pause", 204, &[]),
    ("resume", 204, &[]),
    ("remove-device=_disk0", 204, &[]),
    ("ping", 200, &["\"pid\":"]),
    ("shutdown-vmm", 204, &[]),
];

fn start() -> Option<Vmm> {
    Vmm::start(OsStr::new(env!("CARGO_BIN_EXE_carom")), DIRECTORY, |dir| {
        fs::write(dir.join("initrd"), "the small guest does not read this").unwrap();
        File::create_new(dir.join("disk.img")).unwrap().set_len(1 << 20).unwrap();
    })
}

/// Returns the file that records a step's request.
fn record(place: usize, (call, ..): Step) -> PathBuf {
    let name = call.split('=').next().unwrap();
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kata/requests");
    dir.join(format!("{place:02}-{name}.http"))
}

#[test]
fn client_itself_is_answered_as_its_runtime_expects() {
    let Some(program) = client("CAROM_KATA_CLIENT", "Kata Containers' client") else { return };
    let Some(vmm) = start() else { return };
    let proxy = vmm.path("proxy.sock");
    let listener = UnixListener::bind(&proxy).unwrap();
    for (place, step) in STEPS.iter().enumerate() {
        let (call, status, says) = *step;
        let mut client = Command::new(&program);
        client.arg(&proxy).arg(vmm.path("")).arg(call);
        let client = thread::spawn(move || client.output().unwrap());
        let sent = vmm.anywhere(&pass_on(&listener, &vmm));
        let output = client.join().unwrap();
        let said = [output.stdout, output.stderr].map(|said| String::from_utf8(said).unwrap()).concat();
        println!("{call}: {} {said}", output.status);
        assert_eq!(output.status.success(), status < 300, "{call}: {said}");
        assert!(says.iter().all(|part| said.contains(part)), "{call}: {said}");
        check_sent(&record(place, *step), &sent);
    }
    vmm.wait();
}

#[test]
fn recorded_kata_requests_get_the_expected_answers() {
    let Some(vmm) = start() else { return };
    for (place, step) in STEPS.iter().enumerate() {
        let (_, wanted, says) = *step;
        vmm.answers(&record(place, *step), wanted, says);
    }
    vmm.wait();
}

/// Sends a recorded request of the runtime or of its client. The answer must have this status and contain all of `says`.
fn sends(vmm: &Vmm, request: &str, wanted: u16, says: &[&str]) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/kata").join(request).with_extension("http");
    vmm.answers(&file, wanted, says);
}

#[test]
fn runtime_sandbox_requests_create_file_system_and_drive() {
    let all = ["\"tag\":\"kataShared\"", "\"pci_segment\":1", "\"size\":536870912"];
    for (request, says) in
        [("create", "\"devices\":[]"), ("create-with-a-drive", "\"path\":\"/sys/bus/pci/devices/0000:ff:1f.7\"")]
    {
        let Some(vmm) = start() else { return };
        sends(&vmm, &format!("runtime/{request}"), 204, &[]);
        sends(&vmm, "requests/02-info", 200, &all);
        sends(&vmm, "requests/02-info", 200, &[says]);
        sends(&vmm, "runtime/shutdown-vmm", 204, &[]);
        vmm.wait();
    }
}

#[test]
fn only_the_runtimes_missing_drive_request_fails() {
    let Some(vmm) = start() else { return };
    sends(&vmm, "requests/01-create", 204, &[]);
    sends(&vmm, "runtime/boot", 204, &[]);
    sends(&vmm, "runtime/add-device", 400, &["0000:ff:1f.7"]);
    sends(&vmm, "runtime/resize-vcpus", 204, &[]);
    sends(&vmm, "runtime/resize-memory", 204, &[]);
    sends(&vmm, "requests/02-info", 200, &["\"boot_vcpus\":2", "\"memory_actual_size\":805306368"]);
    sends(&vmm, "runtime/remove-device", 404, &["_vfio0"]);
    sends(&vmm, "runtime/shutdown-vmm", 204, &[]);
    vmm.wait();
}

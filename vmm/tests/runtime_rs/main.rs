// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests the API calls that Kata Containers' runtime in Rust makes to Cloud Hypervisor with Cloud Hypervisor's `api_client`.
//!
//! `CAROM_RUNTIME_RS_CLIENT` names the program that is built from `driver.rs`, the runtime's crate `ch-config` and `api_client`
//! (`docs/kata.md`). Without this variable, the tests send recorded requests of the driver, also on one connection. With `CAROM_BLESS=1`,
//! the tests record the driver's requests. Without access to `/dev/kvm`, these tests do nothing. The steps do not include `add-net`,
//! because its request carries descriptors of a tap interface on the host.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../recorded/mod.rs"]
#[expect(dead_code, reason = "all requests are sent on one connection")]
mod recorded;

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use recorded::{Vmm, check_sent, client, http, pass_on};

/// Placeholder for the test's directory in recorded requests.
const DIRECTORY: &str = "/tmp/carom-runtime-rs-XXXXXX";

/// Step of the driver, expected parts of the printed answer, and the step's requests with the status of each answer.
type Step = (&'static str, &'static [&'static str], &'static [(&'static str, u16)]);

/// Steps in the life of a sandbox, in the runtime's order.
static STEPS: &[Step] = &[
    ("ping", &["\"features\":["], &[("vmm.ping", 200)]),
    ("create", &[], &[("vm.create", 204)]),
    // The runtime cannot parse an answer without these fields, because its types have no default for them.
    ("info", &["\"state\":\"Created\"", "\"max_phys_bits\":46", "\"num_pci_segments\":1"], &[("vm.info", 200)]),
    ("boot", &[], &[("vm.boot", 204)]),
    ("info", &["\"state\":\"Running\"", "\"size\":268435456", "\"free_page_reporting\":true"], &[("vm.info", 200)]),
    ("add-disk=disk.img", &["\"id\":\"_disk0\"", "\"bdf\":\"0000:00:"], &[("vm.add-disk", 200)]),
    ("add-device=/sys/bus/pci/devices/0000:ff:1f.7", &["BadRequest", "0000:ff:1f.7"], &[("vm.add-device", 400)]),
    ("add-vsock=more.sock", &["BadRequest", "the VM already has such a device"], &[("vm.add-vsock", 400)]),
    ("resize-memory=512", &[], &[("vm.info", 200), ("vm.resize", 204)]),
    ("resize-vcpus=2", &[], &[("vm.resize", 204)]),
    ("info", &["\"boot_vcpus\":2", "\"memory_actual_size\":536870912", "\"image_type\":\"Raw\""], &[("vm.info", 200)]),
    ("pause", &[], &[("vm.pause", 204)]),
    // The snapshot is written to the directory that contains the template's memory file.
    ("snapshot=template", &[], &[("vm.snapshot", 204)]),
    ("resume", &[], &[("vm.resume", 204)]),
    ("remove-device=_disk0", &[], &[("vm.remove-device", 204)]),
    ("ping", &["\"pid\":"], &[("vmm.ping", 200)]),
    ("shutdown-vmm", &[], &[("vmm.shutdown", 204)]),
];

fn start() -> Option<Vmm> {
    Vmm::start(OsStr::new(env!("CARGO_BIN_EXE_carom")), DIRECTORY, |dir| {
        fs::write(dir.join("initrd"), "the small guest does not read this").unwrap();
        File::create_new(dir.join("disk.img")).unwrap().set_len(1 << 20).unwrap();
        fs::create_dir(dir.join("template")).unwrap();
        fs::write(dir.join("template/memory"), "").unwrap();
    })
}

/// Returns the requests of all steps in their order, each with the file of its record.
fn requests() -> impl Iterator<Item = (&'static str, u16, PathBuf)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/runtime_rs/requests");
    let all = STEPS.iter().flat_map(|(_, _, requests)| *requests).enumerate();
    all.map(move |(place, (name, status))| (*name, *status, dir.join(format!("{place:02}-{name}.http"))))
}

/// Removes the first request from the bytes that a client has sent. Returns this request.
fn first(sent: &mut String) -> String {
    let head = sent.find("\r\n\r\n").unwrap() + 4;
    let length = sent[..head].split("\r\nContent-Length: ").nth(1);
    let length = length.map_or(0, |rest| rest.split_once('\r').unwrap().0.parse().unwrap());
    let rest = sent.split_off(head + length);
    std::mem::replace(sent, rest)
}

#[test]
fn runtime_rs_client_gets_expected_answers_on_one_connection() {
    let what = "the client of Kata Containers' runtime in Rust";
    let Some(program) = client("CAROM_RUNTIME_RS_CLIENT", what) else { return };
    let Some(vmm) = start() else { return };
    let proxy = vmm.path("proxy.sock");
    let listener = UnixListener::bind(&proxy).unwrap();
    let mut client = Command::new(&program);
    client.arg(&proxy).arg(vmm.path("")).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut client = client.spawn().unwrap();
    let steps: String = STEPS.iter().map(|(step, ..)| format!("{step}\n")).collect();
    client.stdin.take().unwrap().write_all(steps.as_bytes()).unwrap();
    let client = thread::spawn(move || client.wait_with_output().unwrap());
    let sent = pass_on(&listener, &vmm);
    let output = client.join().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(said.lines().count(), STEPS.len());
    for ((step, says, requests), line) in STEPS.iter().zip(said.lines()) {
        println!("{line}");
        let word = if requests.iter().all(|(_, status)| *status < 300) { "done" } else { "failed" };
        assert!(line.starts_with(&format!("{step} {word}")), "{line}");
        assert!(says.iter().all(|part| line.replace('\\', "").contains(part)), "{line}");
    }
    // The requests contain the lengths of their bodies. These lengths stay correct, because the directory's name is as long as its
    // placeholder.
    let mut sent = vmm.anywhere(&sent);
    for (name, _, file) in requests() {
        let request = first(&mut sent);
        assert!(request.lines().next().unwrap().ends_with(&format!(" /api/v1/{name} HTTP/1.1")), "{name}: {request}");
        check_sent(&file, &request);
    }
    assert_eq!(sent, "");
    vmm.wait();
}

#[test]
fn recorded_requests_get_expected_answers_on_one_connection() {
    let Some(vmm) = start() else { return };
    let mut stream = vmm.connect();
    let mut answers = BufReader::new(stream.try_clone().unwrap());
    for (_, wanted, file) in requests() {
        let request = vmm.here(&fs::read_to_string(&file).unwrap());
        // Send each request in the same three parts as the client does: the start of the head, the rest of the head, and the body.
        let accept = request.find("Accept: */*\r\n").unwrap() + "Accept: */*\r\n".len();
        let body = request.find("\r\n\r\n").unwrap() + 4;
        for part in [&request[..accept], &request[accept..body], &request[body..]] {
            stream.write_all(part.as_bytes()).unwrap();
        }
        let (status, body) = http::receive(&mut answers);
        assert_eq!(status, wanted, "{}: {}", file.display(), String::from_utf8_lossy(&body));
    }
    vmm.wait();
}

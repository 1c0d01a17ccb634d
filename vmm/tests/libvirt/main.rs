// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests libvirt's driver for Cloud Hypervisor, which controls Carom here. The steps cover the life of a domain.
//!
//! `CAROM_LIBVIRT` names the directory that libvirt was installed in (`docs/libvirt.md`). libvirt's daemon runs in its own namespaces, and
//! virsh controls the daemon. Without the variable, the tests send recorded requests of libvirt. With `CAROM_BLESS=1`, the tests record
//! libvirt's requests. Without access to `/dev/kvm`, these tests do nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../recorded/mod.rs"]
#[expect(dead_code, reason = "libvirt starts the VMM itself")]
mod recorded;
mod recorder;
mod steps;

use std::env;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use recorded::{Vmm, check_sent, client, echo_guest, http, tiny_guest};
use steps::{HOT_PLUG, RESTORE, Request, STEPS};

/// Placeholder for the test's directory in recorded requests.
const DIRECTORY: &str = "/tmp/carom-libvirt-XXXXXX";

/// Returns the directory of the records.
fn records() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/libvirt/requests")
}

/// Returns the requests of all steps in their order, each with the file of its record.
fn requests() -> impl Iterator<Item = (&'static Request, PathBuf)> {
    let all = STEPS.iter().flat_map(|step| step.requests).enumerate();
    all.map(|(place, request)| (request, records().join(format!("{place:02}-{}.http", request.name))))
}

/// Creates the files of the domain.
fn prepare(dir: &Path) {
    for image in ["disk.img", "more.img"] {
        File::create_new(dir.join(image)).unwrap().set_len(1 << 20).unwrap();
    }
}

/// libvirt's daemon, and the streams that control virsh.
struct Session {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    dir: tempfile::TempDir,
}

impl Session {
    fn start(prefix: &OsStr) -> Self {
        let dir = tempfile::Builder::new().prefix("carom-libvirt-").rand_bytes(6).tempdir_in("/tmp").unwrap();
        let path = dir.path();
        assert_eq!(path.to_str().unwrap().len(), DIRECTORY.len());
        let mut kernel = tiny_guest::elf(echo_guest::ECHO);
        kernel.resize(512, 0);
        fs::write(path.join("kernel"), kernel).unwrap();
        prepare(path);
        for directory in ["recorded", "carom"] {
            fs::create_dir(path.join(directory)).unwrap();
        }
        symlink(env!("CARGO_BIN_EXE_carom"), path.join("carom/cloud-hypervisor")).unwrap();
        symlink(env::current_exe().unwrap(), path.join("recorder")).unwrap();
        let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/libvirt");
        // libvirt finds the emulator by this name. The emulator is a copy, because the script in the source tree may not be executable.
        let mut emulator =
            File::options().mode(0o755).write(true).create_new(true).open(path.join("cloud-hypervisor")).unwrap();
        emulator.write_all(&fs::read(scripts.join("emulator.sh")).unwrap()).unwrap();
        drop(emulator);
        for (name, xml) in steps::domains(path.to_str().unwrap()) {
            fs::write(path.join(name), xml).unwrap();
        }
        let mut command = Command::new("unshare");
        command.args([
            "--mount",
            "--net",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "--propagation",
            "private",
            "sh",
        ]);
        command.arg(scripts.join("session.sh")).arg(prefix).arg(path).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (orders, answers) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, orders, answers, dir }
    }

    /// Runs a virsh command. Returns true if the command succeeded, and its output.
    fn virsh(&mut self, arguments: &str) -> (bool, String) {
        let line = self.here(arguments);
        writeln!(self.orders.as_mut().unwrap(), "{line}").unwrap();
        let mut said = String::new();
        loop {
            let mut line = String::new();
            assert_ne!(self.answers.read_line(&mut line).unwrap(), 0, "the session has ended: {said}");
            match line.strip_prefix("status ") {
                Some(status) => return (status.trim() == "0", said),
                None => said.push_str(&line),
            }
        }
    }

    fn here(&self, text: &str) -> String {
        text.replace(DIRECTORY, self.dir.path().to_str().unwrap())
    }

    /// Waits until `count` requests are recorded. Returns the last request.
    fn recorded(&self, count: usize) -> String {
        let file = self.dir.path().join(format!("recorded/{:02}", count - 1));
        let start = Instant::now();
        while !file.exists() {
            assert!(start.elapsed() < http::LIMIT, "request {count} did not arrive");
            thread::sleep(Duration::from_millis(10));
        }
        fs::read_to_string(file).unwrap().replace(self.dir.path().to_str().unwrap(), DIRECTORY)
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // The first process of the namespace ends when its input ends. All other processes of the namespace end with the first process.
        drop(self.orders.take());
        let _ = self.child.wait();
    }
}

/// Not a test by itself: `emulator.sh` starts a process that runs only this function, and configures the process by environment variables.
#[test]
fn recorder() {
    recorder::run();
}

#[test]
fn driver_itself_leads_a_domain_through_its_life() {
    let Some(prefix) = client("CAROM_LIBVIRT", "the directory that libvirt was installed in") else { return };
    let mut session = Session::start(&prefix);
    let mut records = requests();
    let mut count = 0;
    for step in STEPS {
        let (done, said) = session.virsh(step.virsh);
        println!("{}: {done} {said}", step.virsh);
        assert_eq!(done, step.done, "{}: {said}", step.virsh);
        assert!(step.says.iter().all(|part| said.contains(part)), "{}: {said}", step.virsh);
        for _ in step.requests {
            count += 1;
            let (sent, (request, file)) = (session.recorded(count), records.next().unwrap());
            let line = sent.lines().next().unwrap();
            assert!(line.ends_with(&format!(" /api/v1/{} HTTP/1.1", request.name)), "{}: {line}", request.name);
            check_sent(&file, &sent);
        }
    }
    let all = fs::read_dir(session.dir.path().join("recorded")).unwrap().count();
    assert_eq!(all, count, "more requests than expected");
}

#[test]
fn recorded_libvirt_requests_get_the_expected_answers() {
    let Some(vmm) = Vmm::start(OsStr::new(env!("CARGO_BIN_EXE_carom")), DIRECTORY, prepare) else { return };
    let restore = (&RESTORE, records().join("restore.http"));
    for (request, file) in requests().chain([restore]) {
        if request.begins {
            // With libvirt, each VM has its own VMM. Here all VMs have the same VMM, so delete the previous VM.
            let mut stream = vmm.connect();
            http::send(&mut stream, "PUT", "vm.delete", None);
            http::receive(&mut BufReader::new(stream));
        }
        if request.needs_the_hosts_network {
            continue;
        }
        answers(&vmm, request, &file);
    }
}

fn answers(vmm: &Vmm, request: &Request, file: &Path) {
    vmm.answers(file, request.status, request.says);
}

#[test]
fn disk_of_a_newer_driver_is_attached_and_detached() {
    let Some(vmm) = Vmm::start(OsStr::new(env!("CARGO_BIN_EXE_carom")), DIRECTORY, prepare) else { return };
    for (request, file) in requests().take(2) {
        answers(&vmm, request, &file);
    }
    for (request, name) in &HOT_PLUG {
        answers(&vmm, request, &records().join(name).with_extension("http"));
    }
}

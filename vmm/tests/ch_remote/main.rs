// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Cloud Hypervisor's client, ch-remote, through all of its verbs.
//!
//! `CAROM_CH_REMOTE` names the program, built from its sources; without, its requests as they were recorded are sent again. With
//! `CAROM_BLESS=1` they are recorded. Where there is no `/dev/kvm` that this process may use, these tests do nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../http/mod.rs"]
#[expect(dead_code, reason = "these tests send what others made")]
mod http;
mod steps;
#[path = "../tiny_guest/mod.rs"]
mod tiny_guest;

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::io::{BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use http::PATIENCE;
use steps::{STEPS, Step};

/// Stands for the test's directory in recorded requests, which must have the length of the real one.
const DIRECTORY: &str = "/tmp/carom-ch-remote-XXXXXX";

/// Where docs say how the client's output differs from what it is with Cloud Hypervisor.
const DOCS: &str = "../docs/ch-remote.md";

/// A VMM without a VM, in a directory whose name has the length of [`DIRECTORY`].
struct Vmm {
    child: Child,
    dir: tempfile::TempDir,
}

impl Vmm {
    fn start() -> Option<Self> {
        Self::start_as(OsStr::new(env!("CARGO_BIN_EXE_carom")))
    }

    fn start_as(program: &OsStr) -> Option<Self> {
        if let Err(error) = OpenOptions::new().read(true).write(true).open("/dev/kvm") {
            eprintln!("not tested: /dev/kvm: {error}");
            return None;
        }
        let dir = tempfile::Builder::new().prefix("carom-ch-remote-").rand_bytes(6).tempdir_in("/tmp").unwrap();
        assert_eq!(dir.path().to_str().unwrap().len(), DIRECTORY.len());
        let mut kernel = tiny_guest::elf(tiny_guest::ECHO);
        // It is the image of a disk too, which has a block at least.
        kernel.resize(kernel.len().max(512), 0);
        fs::write(dir.path().join("kernel"), kernel).unwrap();
        let config = steps::config(dir.path().to_str().unwrap());
        fs::write(dir.path().join("config.json"), config).unwrap();
        fs::create_dir(dir.path().join("snapshot")).unwrap();
        let child = Command::new(program)
            .arg("--api-socket")
            .arg(dir.path().join("api.sock"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let vmm = Self { child, dir };
        vmm.connect();
        Some(vmm)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn connect(&self) -> UnixStream {
        let start = Instant::now();
        loop {
            match UnixStream::connect(self.path("api.sock")) {
                Ok(stream) => {
                    stream.set_read_timeout(Some(PATIENCE)).unwrap();
                    return stream;
                }
                Err(error) => assert!(start.elapsed() < PATIENCE, "{error}"),
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// What is written with the test's directory in it, as it is in any other run.
    fn anywhere(&self, text: &str) -> String {
        text.replace(self.dir.path().to_str().unwrap(), DIRECTORY)
    }

    fn here(&self, text: &str) -> String {
        text.replace(DIRECTORY, self.dir.path().to_str().unwrap())
    }

    fn wait(mut self) {
        let start = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < PATIENCE, "it does not end");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Where a step's request is recorded.
fn record(step: &Step) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ch_remote/requests").join(step.name()).with_extension("http")
}

/// Passes one connection on from `listener` to the VMM, and returns what the client sent. The client closes it when it has its
/// answer.
fn pass_on(listener: &UnixListener, vmm: &Vmm) -> String {
    let (mut client, _) = listener.accept().unwrap();
    let server = vmm.connect();
    let mut answers = server.try_clone().unwrap();
    let mut to_client = client.try_clone().unwrap();
    let back = thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(len @ 1..) = answers.read(&mut bytes) {
            if to_client.write_all(&bytes[..len]).is_err() {
                break;
            }
        }
    });
    let mut sent = Vec::new();
    let mut bytes = [0; 4096];
    while let Ok(len @ 1..) = client.read(&mut bytes) {
        sent.extend_from_slice(&bytes[..len]);
        (&server).write_all(&bytes[..len]).unwrap();
    }
    let _ = server.shutdown(Shutdown::Both);
    back.join().unwrap();
    String::from_utf8(sent).unwrap()
}

#[test]
fn every_verb_of_the_client_itself_ends_as_it_should() {
    let Some(program) = env::var_os("CAROM_CH_REMOTE") else {
        eprintln!("not tested: CAROM_CH_REMOTE does not name Cloud Hypervisor's client");
        return;
    };
    let Some(vmm) = Vmm::start() else { return };
    let proxy = vmm.path("proxy.sock");
    let listener = UnixListener::bind(&proxy).unwrap();
    for step in STEPS {
        let arguments = step.arguments.iter().map(|argument| vmm.here(argument));
        let mut client = Command::new(&program);
        client.arg("--api-socket").arg(&proxy).args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
        let client = client.spawn().unwrap();
        let sent = vmm.anywhere(&pass_on(&listener, &vmm));
        let output = client.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        let complaint = String::from_utf8_lossy(&output.stderr);
        println!("{}: {} {said}{complaint}", step.name(), output.status);
        assert_eq!(output.status.success(), step.status < 300, "{}: {complaint}", step.name());
        assert!(step.says.iter().all(|part| said.contains(part) || complaint.contains(part)), "{said}{complaint}");
        let file = record(step);
        if env::var_os("CAROM_BLESS").is_some() {
            fs::write(&file, &sent).unwrap();
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), sent, "{}", file.display());
    }
    vmm.wait();
}

#[test]
fn every_recorded_request_of_the_client_is_answered_as_it_should_be() {
    let Some(vmm) = Vmm::start() else { return };
    for step in STEPS {
        let request = fs::read_to_string(record(step)).unwrap();
        let mut stream = vmm.connect();
        // As the client does it: head and body apart.
        let (head, body) = request.split_once("\r\n\r\n").unwrap();
        stream.write_all(format!("{}\r\n\r\n", vmm.here(head)).as_bytes()).unwrap();
        stream.write_all(vmm.here(body).as_bytes()).unwrap();
        let (status, body) = http::receive(&mut BufReader::new(stream));
        let body = String::from_utf8(body).unwrap();
        assert_eq!(status, step.status, "{}: {body}", step.name());
        assert!(step.says.iter().all(|part| body.contains(part)), "{}: {body}", step.name());
    }
    vmm.wait();
}

/// Adds the path of each field in `value` to `paths`, and what it is. What depends on names is left out.
fn fields(value: &Value, path: &str, paths: &mut BTreeSet<String>) {
    match value {
        Value::Object(object) if path.ends_with("device_tree") => {
            object.values().for_each(|node| fields(node, &format!("{path}.*"), paths));
        }
        Value::Object(object) => {
            for (key, value) in object {
                fields(value, &format!("{path}.{key}"), paths);
            }
        }
        Value::Array(list) => {
            paths.insert(format!("{path}: a list"));
            list.iter().for_each(|element| fields(element, &format!("{path}.*"), paths));
        }
        // As if it were not there, for clients of either.
        Value::Null => {}
        Value::String(_) => drop(paths.insert(format!("{path}: a text"))),
        Value::Number(_) => drop(paths.insert(format!("{path}: a number"))),
        Value::Bool(_) => drop(paths.insert(format!("{path}: true or false"))),
    }
}

/// What of `there`, from Cloud Hypervisor, is not in `here`.
fn missing(step: &Step, here: &str, there: &str) -> BTreeSet<String> {
    let parse = |text: &str| {
        let mut paths = BTreeSet::new();
        if !text.trim().is_empty() {
            fields(&serde_json::from_str(text).unwrap(), step.arguments[0], &mut paths);
        }
        paths
    };
    parse(there).difference(&parse(here)).cloned().collect()
}

#[test]
fn client_reads_of_this_vmm_what_it_reads_of_cloud_hypervisor() {
    let (Some(client), Some(peer)) = (env::var_os("CAROM_CH_REMOTE"), env::var_os("CAROM_CLOUD_HYPERVISOR")) else {
        eprintln!("not tested: CAROM_CH_REMOTE and CAROM_CLOUD_HYPERVISOR do not name Cloud Hypervisor's programs");
        return;
    };
    let (Some(here), Some(there)) = (Vmm::start(), Vmm::start_as(&peer)) else { return };
    let mut differences = BTreeSet::new();
    for step in STEPS {
        let run = |vmm: &Vmm| {
            let arguments = step.arguments.iter().map(|argument| vmm.here(argument));
            let mut command = Command::new(&client);
            let output = command.arg("--api-socket").arg(vmm.path("api.sock")).args(arguments).output().unwrap();
            let said = String::from_utf8(output.stdout).unwrap();
            println!("{}: {} {said}", step.name(), output.status);
            (output.status.success(), said)
        };
        let ((done, said), (peer_done, peer_said)) = (run(&here), run(&there));
        if done != peer_done {
            let word = |done| if done { "done" } else { "refused" };
            differences.insert(format!("{}: {}, there {}", step.arguments[0], word(done), word(peer_done)));
        }
        differences.extend(missing(step, &said, &peer_said));
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(DOCS);
    let docs = fs::read_to_string(&file).unwrap();
    // They are its end.
    let (text, _) = docs.split_once("- `").unwrap_or((&docs, ""));
    let list: String = differences.iter().map(|difference| format!("- `{difference}`\n")).collect();
    if env::var_os("CAROM_BLESS").is_some() {
        fs::write(&file, text.to_string() + &list).unwrap();
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), text.to_string() + &list, "{}", file.display());
}

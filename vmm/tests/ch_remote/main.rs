// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Cloud Hypervisor's client, ch-remote, through all of its verbs.
//!
//! `CAROM_CH_REMOTE` names the program, built from its sources; without, its requests as they were recorded are sent again. With
//! `CAROM_BLESS=1` they are recorded. Where there is no `/dev/kvm` that this process may use, these tests do nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../http/mod.rs"]
#[expect(dead_code, reason = "these tests send what others made")]
mod http;
#[path = "../recorded/mod.rs"]
mod recorded;
mod steps;
#[path = "../tiny_guest/mod.rs"]
mod tiny_guest;

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use recorded::{Vmm, pass_on};
use steps::{STEPS, Step};

/// Stands for the test's directory in recorded requests.
const DIRECTORY: &str = "/tmp/carom-ch-remote-XXXXXX";

/// Where docs say how the client's output differs from what it is with Cloud Hypervisor.
const DOCS: &str = "../docs/ch-remote.md";

/// A VMM in a directory with what the steps need.
fn start_as(program: &OsStr) -> Option<Vmm> {
    Vmm::start(program, DIRECTORY, |dir| {
        let config = steps::config(dir.to_str().unwrap());
        fs::write(dir.join("config.json"), config).unwrap();
        fs::create_dir(dir.join("snapshot")).unwrap();
    })
}

fn start() -> Option<Vmm> {
    start_as(OsStr::new(env!("CARGO_BIN_EXE_carom")))
}

/// Where a step's request is recorded.
fn record(step: &Step) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ch_remote/requests").join(step.name()).with_extension("http")
}

#[test]
fn every_verb_of_the_client_itself_ends_as_it_should() {
    let Some(program) = env::var_os("CAROM_CH_REMOTE") else {
        eprintln!("not tested: CAROM_CH_REMOTE does not name Cloud Hypervisor's client");
        return;
    };
    let Some(vmm) = start() else { return };
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
    let Some(vmm) = start() else { return };
    for step in STEPS {
        let (status, body) = vmm.replay(&record(step));
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
    let (Some(here), Some(there)) = (start(), start_as(&peer)) else { return };
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

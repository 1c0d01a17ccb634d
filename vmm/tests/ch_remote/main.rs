// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests Carom with ch-remote, Cloud Hypervisor's client. The tests use most verbs that Carom implements.
//!
//! `CAROM_CH_REMOTE` names the client's program, which must be built from its sources. Without this variable, the tests send recorded
//! requests of ch-remote. With `CAROM_BLESS=1`, the tests record the client's requests. Without access to `/dev/kvm`, these tests do
//! nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../recorded/mod.rs"]
mod recorded;
mod steps;

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use recorded::{Vmm, check_sent, client, pass_on};
use steps::{STEPS, Step};

/// Placeholder for the test's directory in recorded requests.
const DIRECTORY: &str = "/tmp/carom-ch-remote-XXXXXX";

/// Page that lists the differences between the client's output with Carom and with Cloud Hypervisor.
const DOCS: &str = "../docs/ch-remote.md";

/// Starts a VMM in a directory with the files that the steps need.
fn start_as(program: &OsStr) -> Option<Vmm> {
    Vmm::start(program, DIRECTORY, |dir| {
        let config = steps::config(dir.to_str().unwrap());
        fs::write(dir.join("config.json"), config).unwrap();
        fs::create_dir(dir.join("snapshot")).unwrap();
        File::create_new(dir.join("disk.img")).unwrap().set_len(1 << 20).unwrap();
    })
}

fn start() -> Option<Vmm> {
    start_as(OsStr::new(env!("CARGO_BIN_EXE_carom")))
}

/// Returns the file that records a step's request.
fn record(step: &Step) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ch_remote/requests").join(step.name()).with_extension("http")
}

#[test]
fn calls_of_ch_remote_have_the_expected_results() {
    let Some(program) = client("CAROM_CH_REMOTE", "Cloud Hypervisor's client") else { return };
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
        check_sent(&record(step), &sent);
    }
    vmm.wait();
}

#[test]
fn recorded_ch_remote_requests_get_the_expected_answers() {
    let Some(vmm) = start() else { return };
    for step in STEPS {
        vmm.answers(&record(step), step.status, step.says);
    }
    vmm.wait();
}

/// Values of fields. A key consists of the path and the type of a field.
type Fields = BTreeMap<String, BTreeSet<String>>;

/// Adds the path of each field in `value` to `paths`. In a path, `*` replaces the names of devices and the indices of lists.
fn fields(value: &Value, path: &str, paths: &mut Fields) {
    let mut add = |kind: &str| {
        paths.entry(format!("{path}: {kind}")).or_default().insert(value.to_string());
    };
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
            paths.entry(format!("{path}: a list")).or_default();
            list.iter().for_each(|element| fields(element, &format!("{path}.*"), paths));
        }
        // For clients of either VMM, null means that the field is absent.
        Value::Null => {}
        Value::String(_) => add("a text"),
        Value::Number(_) => add("a number"),
        Value::Bool(_) => add("true or false"),
    }
}

/// True if the field's value differs between VMMs or between runs.
fn is_of_its_own(path: &str) -> bool {
    ["ping.", "counters.", "info.device_tree."].iter().any(|start| path.starts_with(start))
}

/// Compares `here`, the client's output for Carom, with `there`, the client's output for Cloud Hypervisor. Returns the fields of `there`
/// that are missing in `here`, or that have another value in `here`.
fn differences(step: &Step, here: &str, there: &str) -> BTreeSet<String> {
    let parse = |text: &str| {
        let mut paths = Fields::new();
        if !text.trim().is_empty() {
            fields(&serde_json::from_str(text).unwrap(), step.arguments[0], &mut paths);
        }
        paths
    };
    let (here, there) = (parse(here), parse(there));
    // If only one VMM gives an answer, missing fields are not listed, because the page lists the verb's result for each VMM.
    let both = !here.is_empty() && !there.is_empty();
    let list = |values: &BTreeSet<String>| values.iter().cloned().collect::<Vec<_>>().join(" ");
    let of = |(field, values): (&String, &BTreeSet<String>)| match here.get(field) {
        None => both.then(|| field.clone()),
        Some(ours) if ours == values || is_of_its_own(field) => None,
        Some(ours) => {
            let (path, _) = field.rsplit_once(": ").unwrap();
            Some(format!("{path}: {}, there {}", list(ours), list(values)))
        }
    };
    there.iter().filter_map(of).collect()
}

#[test]
fn client_output_differs_only_as_documented() {
    let (Some(client), Some(peer)) = (env::var_os("CAROM_CH_REMOTE"), env::var_os("CAROM_CLOUD_HYPERVISOR")) else {
        eprintln!("not tested: CAROM_CH_REMOTE and CAROM_CLOUD_HYPERVISOR do not name Cloud Hypervisor's programs");
        return;
    };
    let (Some(here), Some(there)) = (start(), start_as(&peer)) else { return };
    let mut all = BTreeSet::new();
    for step in STEPS {
        let run = |vmm: &Vmm| {
            let arguments = step.arguments.iter().map(|argument| vmm.here(argument));
            let mut command = Command::new(&client);
            let output = command.arg("--api-socket").arg(vmm.path("api.sock")).args(arguments).output().unwrap();
            let said = String::from_utf8(output.stdout).unwrap();
            println!("{}: {} {said}", step.name(), output.status);
            (output.status.success(), vmm.anywhere(&said))
        };
        let ((done, said), (peer_done, peer_said)) = (run(&here), run(&there));
        if done != peer_done {
            let word = |done| if done { "done" } else { "refused" };
            all.insert(format!("{}: {}, there {}", step.arguments[0], word(done), word(peer_done)));
        }
        all.extend(differences(step, &said, &peer_said));
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(DOCS);
    let docs = fs::read_to_string(&file).unwrap();
    // The differences are at the end of the page.
    let (text, _) = docs.split_once("- `").unwrap_or((&docs, ""));
    let list: String = all.iter().map(|difference| format!("- `{difference}`\n")).collect();
    if env::var_os("CAROM_BLESS").is_some() {
        fs::write(&file, text.to_string() + &list).unwrap();
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), text.to_string() + &list, "{}", file.display());
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests a real `carom` process whose files reach their size limit (RLIMIT_FSIZE). Only writes beyond the limit fail.
//!
//! Without access to `/dev/kvm`, these tests do nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod disk_guest;
mod guest_code;
mod http;
mod program;
mod tiny_guest;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;

use rustix::process::{Pid, Resource, Rlimit, prlimit};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
use serde_json::{Value, json};

use disk_guest::{IN, OUT, SECTOR, driver};
use program::{Carom, call, put, start, wait_until};
use tiny_guest::elf;

/// Maximum size of a file in most tests, in bytes.
const LIMIT: u64 = 4096;
/// `again: hlt; jmp again`
const HALT: &[u8] = &[0xf4, 0xeb, 0xfd];
/// `mov dx, 0x3f8; mov al, 'A'; mov ecx, 5000; again: out dx, al; loop again; stop: hlt; jmp stop`
const WRITE_5000: &[u8] =
    &[0x66, 0xba, 0xf8, 0x03, 0xb0, b'A', 0xb9, 0x88, 0x13, 0, 0, 0xee, 0xe2, 0xfd, 0xf4, 0xeb, 0xfd];

/// Limits the size of a process's files.
fn limit(carom: &Carom, bytes: u64) {
    let limit = Rlimit { current: Some(bytes), maximum: Some(bytes) };
    prlimit(Some(Pid::from_child(&carom.0)), Resource::Fsize, limit).unwrap();
}

/// Returns the configuration of a VM whose kernel is `code`. `more` contains further fields.
fn config(dir: &Path, code: &[u8], more: Value) -> Value {
    fs::write(dir.join("kernel"), elf(code)).unwrap();
    let mut config = json!({"payload": {"kernel": dir.join("kernel")}, "memory": {"size": 64 << 20},
        "serial": {"mode": "Null"}});
    let Value::Object(more) = more else { panic!("no object") };
    config.as_object_mut().unwrap().extend(more);
    config
}

fn boot(dir: &Path, config: &Value) -> (u16, Value) {
    put(dir, "vm.create", Some(config));
    call(dir, "PUT", "vm.boot", None)
}

fn ends_in_order(carom: &mut Carom) {
    let status = carom.terminate();
    assert!(status.success(), "{status}");
}

/// Starts the program with a log in `dir`.
fn start_logged(dir: &Path) -> Option<Carom> {
    start(dir, &["--log-file", dir.join("log").to_str().unwrap()])
}

fn log(dir: &Path) -> String {
    fs::read_to_string(dir.join("log")).unwrap()
}

#[test]
fn serial_file_at_the_limit_loses_output_only() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let Some(mut carom) = start_logged(dir) else { return };
    limit(&carom, LIMIT);
    let serial = json!({"serial": {"mode": "File", "file": dir.join("serial")}});
    assert_eq!(boot(dir, &config(dir, WRITE_5000, serial)).0, 204);
    wait_until("the log reports the loss", || log(dir).contains("--serial: output is lost: File too large"));
    assert!(log(dir).contains("RLIMIT_FSIZE"));
    assert_eq!(fs::metadata(dir.join("serial")).unwrap().len(), LIMIT);
    assert_eq!(call(dir, "GET", "vm.info", None).1["state"], "Running");
    ends_in_order(&mut carom);
}

#[test]
fn log_and_events_at_the_limit_are_lost_and_the_vm_runs() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let at = |name: &str| dir.join(name).to_str().unwrap().to_string();
    let events = format!("path={}", at("events"));
    let Some(mut carom) = start(dir, &["-vv", "--log-file", &at("log"), "--event-monitor", &events]) else { return };
    limit(&carom, 200);
    assert_eq!(boot(dir, &config(dir, HALT, json!({}))).0, 204);
    for _ in 0..10 {
        put(dir, "vm.pause", None);
        put(dir, "vm.resume", None);
    }
    assert_eq!(call(dir, "GET", "vm.info", None).1["state"], "Running");
    ends_in_order(&mut carom);
    for name in ["log", "events"] {
        assert!(fs::metadata(dir.join(name)).unwrap().len() <= 200, "{name}");
    }
}

#[test]
fn memory_beyond_the_limit_is_refused_with_a_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let Some(mut carom) = start(dir, &[]) else { return };
    limit(&carom, LIMIT);
    let zone = json!({"id": "big", "size": 64 << 20, "shared": true});
    let in_file = json!({"id": "filed", "size": 64 << 20, "shared": true, "file": dir});
    let rng = json!({"src": "/dev/urandom", "iommu": true});
    for (named, more) in [
        ("zone 'mem0'", json!({"memory": {"size": 64 << 20, "shared": true}})),
        ("zone 'big'", json!({"memory": {"size": 0, "zones": [zone]}})),
        ("memory.zones.file", json!({"memory": {"size": 0, "zones": [in_file]}})),
        ("window memory", json!({"rng": rng, "iommu_bounce": {"size": 8 << 20}})),
    ] {
        let (status, answer) = boot(dir, &config(dir, HALT, more));
        let answer = answer.to_string();
        assert!(status >= 400, "{named}: {status}");
        assert!(answer.contains(named), "{named}: {answer}");
        assert!(answer.contains("(RLIMIT_FSIZE) is 4096 bytes") && answer.contains("ulimit -f"), "{answer}");
        put(dir, "vm.delete", None);
    }
    ends_in_order(&mut carom);
}

#[test]
fn snapshot_beyond_the_limit_fails_and_leaves_no_files() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let Some(mut carom) = start(dir, &[]) else { return };
    assert_eq!(boot(dir, &config(dir, HALT, json!({}))).0, 204);
    put(dir, "vm.pause", None);
    limit(&carom, LIMIT);
    let snapshot = dir.join("snapshot");
    let destination = json!({"destination_url": format!("file://{}", snapshot.display())});
    let (status, answer) = call(dir, "PUT", "vm.snapshot", Some(&destination));
    assert!(status >= 400 && answer.to_string().contains("(RLIMIT_FSIZE) is 4096 bytes"), "{status} {answer}");
    assert!(!snapshot.exists());
    put(dir, "vm.resume", None);
    ends_in_order(&mut carom);
}

/// Creates a qcow2 image of a disk of 1 MiB without data. The header, the refcount table, a refcount block and the L1 table have one
/// cluster each. Returns the size of the image in bytes.
fn make_qcow2(path: &Path) -> u64 {
    const CLUSTER: u64 = 0x1_0000;
    let file = File::create_new(path).unwrap();
    file.set_len(4 * CLUSTER).unwrap();
    let mut header = b"QFI\xfb".to_vec();
    // Header fields: version, no backing file, size of a cluster as a power of 2, size of the disk in bytes, no encryption, number of L1
    // entries.
    [3u32, 0, 0, 0, 16, 0, 1 << 20, 0, 1].iter().for_each(|word| header.extend(word.to_be_bytes()));
    [3 * CLUSTER, CLUSTER].iter().for_each(|place| header.extend(place.to_be_bytes()));
    // More header fields: number of clusters of the refcount table, no snapshots, no features, 16-bit reference counts, length of the
    // header in bytes.
    [1u32, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 104].iter().for_each(|word| header.extend(word.to_be_bytes()));
    file.write_all_at(&header, 0).unwrap();
    file.write_all_at(&(2 * CLUSTER).to_be_bytes(), CLUSTER).unwrap();
    file.write_all_at(&[0, 1, 0, 1, 0, 1, 0, 1], 2 * CLUSTER).unwrap();
    4 * CLUSTER
}

/// Boots a guest that sends `requests` to the disk at `image`, whose file is limited to `bytes` bytes. Returns the disk's counters.
fn counters_of_disk(
    dir: &Path,
    carom: &mut Carom,
    image: &Path,
    format: &str,
    bytes: u64,
    requests: [(u32, u32); 2],
) -> Value {
    limit(carom, bytes);
    let disk = json!({"path": image, "image_type": format, "id": "disk", "pci_device_id": 2});
    let config = config(dir, &driver(requests, b"written"), json!({"disks": [disk]}));
    assert_eq!(boot(dir, &config).0, 204);
    let mut counters = Value::Null;
    wait_until("both requests are served", || {
        counters = call(dir, "GET", "vm.counters", None).1["disk"].take();
        let count = |name: &str| counters[name].as_u64().unwrap();
        count("read_ops") + count("write_ops") + count("errors") == 2
    });
    assert_eq!(call(dir, "GET", "vm.info", None).1["state"], "Running");
    counters
}

fn raw_write_beyond_the_limit_fails(dir: &Path) {
    let image = dir.join("image");
    File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let Some(mut carom) = start_logged(dir) else { return };
    let counters = counters_of_disk(dir, &mut carom, &image, "Raw", LIMIT, [(OUT, 5), (OUT, 100)]);
    let expected = json!([1, 1, 1]);
    assert_eq!(json!([counters["write_ops"], counters["errors"], counters["host_errors"]]), expected);
    ends_in_order(&mut carom);
    let log = log(dir);
    assert!(
        log.contains("disk: a request to the image failed: File too large") && log.contains("RLIMIT_FSIZE"),
        "{log}"
    );
    let bytes = fs::read(&image).unwrap();
    assert!(bytes[5 * SECTOR as usize..].starts_with(b"written"));
    assert!(bytes[100 * SECTOR as usize..].iter().all(|byte| *byte == 0));
}

#[test]
fn disk_write_beyond_the_limit_fails_alone() {
    let dir = tempfile::tempdir().unwrap();
    raw_write_beyond_the_limit_fails(dir.path());
}

#[test]
fn disk_write_without_io_uring_fails_alone() {
    let no_ring = SeccompFilter::new(
        [(libc::SYS_io_uring_setup, Vec::new())].into(),
        SeccompAction::Allow,
        SeccompAction::Errno(1),
        std::env::consts::ARCH.try_into().unwrap(),
    );
    let no_ring: BpfProgram = no_ring.unwrap().try_into().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    // The program inherits the filter from the thread that starts it.
    thread::scope(|scope| {
        scope.spawn(|| {
            seccompiler::apply_filter(&no_ring).unwrap();
            raw_write_beyond_the_limit_fails(dir);
        });
    });
}

#[test]
fn qcow2_write_beyond_the_limit_fails_alone() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let image = dir.join("image");
    let bytes = make_qcow2(&image);
    let Some(mut carom) = start_logged(dir) else { return };
    // The write needs a new cluster, which would exceed the limit.
    let counters = counters_of_disk(dir, &mut carom, &image, "Qcow2", bytes, [(IN, 3), (OUT, 5)]);
    assert_eq!(json!([counters["read_ops"], counters["errors"], counters["host_errors"]]), json!([1, 1, 1]));
    ends_in_order(&mut carom);
    let log = log(dir);
    assert!(log.contains("File too large") && log.contains("RLIMIT_FSIZE"), "{log}");
    assert_eq!(fs::metadata(&image).unwrap().len(), bytes);
}

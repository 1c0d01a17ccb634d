// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests the API of a real `carom` process without a guest. The tests cover the start of the process, its clients, and the files that
//! remain after its end.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod clients;
mod crash;
mod filters;
#[path = "../http/mod.rs"]
mod http;
mod metrics;
mod name;

use std::fs;
use std::io::{BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use vmm::process::signal_actions::is_ignored;

use http::{LIMIT, connect, receive, send};

struct Carom {
    child: Child,
    socket: PathBuf,
    _dir: tempfile::TempDir,
}

fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_carom"));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

impl Carom {
    fn start() -> Self {
        Self::start_by(program(), tempfile::tempdir().unwrap())
    }

    /// Starts `command`, whose files are in `dir`.
    fn start_by(mut command: Command, dir: tempfile::TempDir) -> Self {
        let socket = dir.path().join("api.sock");
        let child = command
            .arg("--api-socket")
            .arg(format!("path={}", socket.display()))
            .arg("--event-monitor")
            .arg(format!("path={}", dir.path().join("events").display()))
            .spawn()
            .unwrap();
        Self::new(child, socket, dir)
    }

    /// Waits until the process listens at `socket`.
    fn new(child: Child, socket: PathBuf, dir: tempfile::TempDir) -> Self {
        wait_for(|| UnixStream::connect(&socket).ok());
        Self { child, socket, _dir: dir }
    }

    fn connect(&self) -> UnixStream {
        connect(&self.socket)
    }

    /// Sends a request on a new connection. Returns the status and body of the answer.
    fn request(&self, method: &str, name: &str, body: Option<&Value>) -> (u16, Value) {
        let mut stream = self.connect();
        send(&mut stream, method, name, body);
        let (status, body) = receive(&mut BufReader::new(stream));
        (status, if body.is_empty() { Value::Null } else { serde_json::from_slice(&body).unwrap() })
    }

    fn put(&self, name: &str) -> (u16, Value) {
        self.request("PUT", name, None)
    }

    fn wait(&mut self) -> ExitStatus {
        wait_for(|| self.child.try_wait().unwrap())
    }

    /// Returns the number of the process's open descriptors.
    fn descriptors(&self) -> usize {
        fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().count()
    }
}

impl Drop for Carom {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn ping_returns_version_and_process() {
    let carom = Carom::start();
    let (status, body) = carom.request("GET", "vmm.ping", None);
    assert_eq!(status, 200);
    assert_eq!(body["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(body["pid"], carom.child.id());
}

#[test]
fn socket_is_owner_only_and_removed_at_each_kind_of_end() {
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        if signal == Signal::HUP && is_ignored(libc::SIGHUP) {
            // This test process ignores SIGHUP, for example because nohup started it. Carom would inherit the ignored signal, and SIGHUP
            // would not end Carom. So the test skips SIGHUP.
            continue;
        }
        let mut carom = Carom::start();
        assert_eq!(fs::metadata(&carom.socket).unwrap().permissions().mode() & 0o777, 0o600);
        kill_process(Pid::from_child(&carom.child), signal).unwrap();
        assert!(carom.wait().success());
        assert!(!carom.socket.exists());
    }
    let mut carom = Carom::start();
    assert_eq!(carom.put("vmm.shutdown").0, 204);
    assert!(carom.wait().success());
    assert!(!carom.socket.exists());
    let events = fs::read_to_string(carom.socket.with_file_name("events")).unwrap();
    let names: Vec<_> =
        events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["event"].clone()).collect();
    assert_eq!(names, ["starting", "shutdown"]);
}

#[test]
fn second_process_on_a_live_socket_is_refused() {
    let carom = Carom::start();
    let second = program().arg("--api-socket").arg(format!("path={}", carom.socket.display())).output().unwrap();
    assert_eq!(second.status.code(), Some(2));
    let text = String::from_utf8(second.stderr).unwrap();
    assert!(text.starts_with("carom: --api-socket ") && text.contains("another process"), "{text}");
    assert_eq!(carom.request("GET", "vmm.ping", None).0, 200);
}

#[test]
fn refused_second_process_leaves_the_files_of_the_first() {
    let carom = Carom::start();
    let file = |name: &str| carom.socket.with_file_name(name);
    let (events, log) = (file("events"), file("log"));
    fs::write(&log, "what the first wrote").unwrap();
    let starting = wait_for(|| fs::read_to_string(&events).ok().filter(|text| text.contains("starting")));
    let same = || {
        let mut command = program();
        command.args(["--event-monitor", &format!("path={}", events.display()), "--log-file", log.to_str().unwrap()]);
        command
    };
    let second = same().arg("--api-socket").arg(format!("path={}", carom.socket.display())).output().unwrap();
    assert_eq!(second.status.code(), Some(2));
    assert_eq!(carom.request("GET", "vmm.ping", None).0, 200);
    assert_eq!(fs::read_to_string(&events).unwrap(), starting);
    assert_eq!(fs::read_to_string(&log).unwrap(), "what the first wrote");
    // A third process has its own socket, so it starts. It empties the files of the first process.
    let other = carom.socket.with_file_name("other.sock");
    let mut third = same().arg("--api-socket").arg(format!("path={}", other.display())).spawn().unwrap();
    wait_for(|| UnixStream::connect(&other).ok());
    // The third process binds its socket first, and empties the files afterwards.
    wait_for(|| fs::read_to_string(&log).ok().filter(String::is_empty));
    third.kill().unwrap();
    third.wait().unwrap();
}

#[test]
fn pipe_as_a_kernel_is_refused_without_waiting() {
    let mut carom = Carom::start();
    let pipe = carom.socket.with_file_name("pipe");
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
    assert_eq!(carom.request("PUT", "vm.create", Some(&json!({"payload": {"kernel": pipe}}))).0, 204);
    let (status, body) = carom.put("vm.boot");
    assert!(status == 400 && body[0].as_str().unwrap().contains("not a regular file"), "{status} {body}");
    assert_eq!(carom.request("GET", "vm.info", None).0, 200);
    kill_process(Pid::from_child(&carom.child), Signal::TERM).unwrap();
    assert!(carom.wait().success());
}

#[test]
fn half_closed_client_gets_its_answer() {
    let carom = Carom::start();
    for (method, name, expected) in [("GET", "vmm.ping", 200), ("GET", "vm.info", 404), ("PUT", "vm.boot", 404)] {
        for _ in 0..50 {
            let mut stream = carom.connect();
            send(&mut stream, method, name, None);
            stream.shutdown(Shutdown::Write).unwrap();
            let mut reader = BufReader::new(stream);
            assert_eq!(receive(&mut reader).0, expected, "{name}");
            assert_eq!(reader.read(&mut [0]).unwrap(), 0, "the connection ends");
        }
    }
}

/// Calls `look` until it returns a value. Returns this value.
fn wait_for<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < LIMIT, "nothing was found in time");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn socket_of_a_killed_process_is_replaced_by_the_next() {
    let mut first = Carom::start();
    first.child.kill().unwrap();
    first.child.wait().unwrap();
    assert!(first.socket.exists());
    first.child = program().arg("--api-socket").arg(format!("path={}", first.socket.display())).spawn().unwrap();
    wait_for(|| UnixStream::connect(&first.socket).ok());
    assert_eq!(first.request("GET", "vmm.ping", None).0, 200);
}

#[test]
fn socket_can_be_inherited() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("made-by-the-parent");
    let listener = UnixListener::bind(&socket).unwrap();
    // The shell passes its standard input on as descriptor 7.
    let mut child = Command::new("sh")
        .args(["-c", "exec \"$0\" --api-socket fd=7 7<&0 0</dev/null", env!("CARGO_BIN_EXE_carom")])
        .stdin(Stdio::from(std::os::fd::OwnedFd::from(listener)))
        .spawn()
        .unwrap();
    let mut stream = connect(&socket);
    send(&mut stream, "GET", "vmm.ping", None);
    assert_eq!(receive(&mut BufReader::new(&stream)).0, 200);
    send(&mut stream, "PUT", "vmm.shutdown", None);
    assert_eq!(receive(&mut BufReader::new(&stream)).0, 204);
    assert!(child.wait().unwrap().success());
    assert!(socket.exists(), "the parent removes its socket itself");
    for (number, wanted) in [("99", "fd=99"), ("0", "not a descriptor number above 2"), ("7", "socket")] {
        let output = Command::new("sh")
            .args(["-c", "exec \"$0\" --api-socket fd=$1 7</dev/null", env!("CARGO_BIN_EXE_carom"), number])
            .output()
            .unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(wanted), "{text}");
    }
}

#[test]
fn unusable_descriptors_are_refused_with_the_option() {
    for (redirection, number, wanted) in [
        ("7</dev/null", "99", "--inherit fd=99: the program was not started with this descriptor"),
        ("7</dev/null", "7", "--inherit fd=7: is neither /dev/kvm, /dev/iommu, a VFIO device"),
        ("7</", "7", "--inherit fd=7: is neither a file, a block device"),
        ("7</proc/self/exe", "7 fd=7", "--inherit fd=7: --inherit names the same descriptor"),
    ] {
        let command = format!("exec \"$0\" --api-socket /nowhere/api --inherit fd={number} {redirection}");
        let carom = env!("CARGO_BIN_EXE_carom");
        let output = Command::new("sh").args(["-c", &command, carom]).stdin(Stdio::piped()).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(wanted), "{text}");
    }
}

#[test]
fn unbooted_vm_is_created_queried_changed_and_deleted() {
    let carom = Carom::start();
    for name in ["vm.boot", "vm.pause", "vm.resume", "vm.reboot", "vm.shutdown", "vm.power-button", "vm.nmi"] {
        assert_eq!(carom.put(name).0, 404, "{name}");
    }
    assert_eq!(carom.request("GET", "vm.info", None).0, 404);
    assert_eq!(carom.request("GET", "vm.counters", None).0, 404);

    let config = json!({"payload": {"kernel": "/no/such/kernel"}, "cpus": {"boot_vcpus": 2, "max_vcpus": 2}});
    assert_eq!(carom.request("PUT", "vm.create", Some(&config)).0, 204);
    assert_eq!(carom.request("PUT", "vm.create", Some(&config)).0, 500);
    let (status, info) = carom.request("GET", "vm.info", None);
    assert_eq!((status, &info["state"]), (200, &json!("Created")));
    assert_eq!(info["config"]["memory"]["size"], 512 << 20);
    assert_eq!(info["memory_actual_size"], 512 << 20);
    for name in ["vm.pause", "vm.resume", "vm.reboot", "vm.shutdown", "vm.power-button", "vm.nmi"] {
        assert_eq!(carom.put(name).0, 500, "{name}");
    }

    assert_eq!(carom.request("PUT", "vm.resize", Some(&json!({"desired_ram": 1 << 30}))).0, 204);
    let (status, error) = carom.request("PUT", "vm.resize", Some(&json!({"desired_ram": 1000})));
    assert_eq!(status, 400);
    assert!(error[0].as_str().unwrap().starts_with("memory.size: 1000 bytes"), "{error}");
    assert_eq!(carom.request("PUT", "vm.add-device", Some(&json!({"path": "/sys/d"}))).0, 204);
    let (_, info) = carom.request("GET", "vm.info", None);
    assert_eq!(info["config"]["memory"]["size"], 1 << 30);
    assert_eq!(info["config"]["devices"][0]["id"], "_vfio0");
    assert_eq!(carom.request("PUT", "vm.remove-device", Some(&json!({"id": "_vfio1"}))).0, 404);
    assert_eq!(carom.request("PUT", "vm.remove-device", Some(&json!({"id": "_vfio0"}))).0, 204);

    // The boot fails, because the file of the kernel is missing or KVM is unavailable. In both cases, the VM stays in the state `Created`.
    let (status, error) = carom.put("vm.boot");
    assert_eq!(status, 400, "{error}");
    let message = error[0].as_str().unwrap();
    assert!(
        message.starts_with("payload.kernel: /no/such/kernel: No such file") || message.starts_with("/dev/kvm: "),
        "{message}"
    );
    assert_eq!(carom.request("GET", "vm.info", None).1["state"], "Created");
    assert_eq!(carom.put("vm.delete").0, 204);
    assert_eq!(carom.put("vm.delete").0, 204);
    assert_eq!(carom.request("GET", "vm.info", None).0, 404);
}

#[test]
fn bounce_windows_of_a_vm_that_is_not_booted_can_be_changed() {
    let carom = Carom::start();
    assert_eq!(carom.request("GET", "vm.iommu-bounce", None).0, 404);
    let mut config = json!({"payload": {"kernel": "/k"}, "devices": [{"path": "/d", "iommu": true}]});
    assert_eq!(carom.request("PUT", "vm.create", Some(&config)).0, 204);
    let (status, error) = carom.request("GET", "vm.iommu-bounce", None);
    assert_eq!(status, 404);
    assert!(error[0].as_str().unwrap().contains("no bounce windows"), "{error}");
    assert_eq!(carom.put("vm.delete").0, 204);

    config["iommu_bounce"] = json!({"max": 1 << 30});
    assert_eq!(carom.request("PUT", "vm.create", Some(&config)).0, 204);
    let (status, bounce) = carom.request("GET", "vm.iommu-bounce", None);
    assert_eq!((status, &bounce["budget"], &bounce["max"]), (200, &json!(64 << 20), &json!(1 << 30)));
    assert_eq!((&bounce["threshold"], &bounce["windows"]), (&json!(0), &json!([])));
    assert_eq!(bounce["threshold_write"], 0);

    let change = |body: &Value| carom.request("PUT", "vm.iommu-bounce", Some(body));
    assert_eq!(change(&json!({"budget": 512 << 20, "threshold": 65536})).0, 204);
    assert_eq!(change(&json!({"threshold_write": 16384})).0, 204);
    assert_eq!(change(&json!({"max_mapped": 96 << 20})).0, 204);
    assert_eq!(change(&json!({})).0, 204);
    for (body, start) in [
        (json!({"budget": 1}), "budget: is 1 bytes, but must be a multiple of 2M and at least 2M"),
        (json!({"budget": 2_u64 << 30}), "budget: 2147483648 bytes exceed the 1073741824 bytes"),
        (json!({"threshold": -1}), "threshold: "),
        (json!({"threshold_write": 4_294_967_296_u64}), "threshold_write: "),
        (json!({"max_mapped": 5000}), "max_mapped: is 5000 bytes, but must be a multiple of 4096"),
    ] {
        let (status, error) = change(&body);
        assert_eq!(status, 400, "{error}");
        assert!(error[0].as_str().unwrap().contains(start), "{error}");
    }
    let (_, info) = carom.request("GET", "vm.info", None);
    assert_eq!(info["iommu_bounce"]["budget"], 512 << 20);
    assert_eq!(info["config"]["iommu_bounce"]["threshold"], 65536);
    assert_eq!(info["config"]["iommu_bounce"]["threshold_write"], 16384);
    assert_eq!(info["iommu_bounce"]["threshold_write"], 16384);
    assert_eq!(
        (&info["iommu_bounce"]["max_mapped"], &info["config"]["iommu_bounce"]["max_mapped"]),
        (&json!(96 << 20), &json!(96 << 20))
    );
    assert_eq!(change(&json!({"max_mapped": 0})).0, 204);
    assert_eq!(carom.request("GET", "vm.info", None).1["iommu_bounce"]["max_mapped"], Value::Null);
    assert_eq!(carom.put("vm.delete").0, 204);

    // Without windows, only the limit of mapped memory can be changed.
    config["iommu_bounce"] = json!({"size": 0, "max_mapped": 4096});
    assert_eq!(carom.request("PUT", "vm.create", Some(&config)).0, 204);
    assert_eq!(change(&json!({"max_mapped": 8192})).0, 204);
    let (status, error) = change(&json!({"budget": 2 << 20}));
    assert_eq!(
        (status, &error[0]),
        (400, &json!("budget: the VM has no bounce windows: create the VM with an iommu_bounce.size above 0"))
    );
    let (_, bounce) = carom.request("GET", "vm.iommu-bounce", None);
    assert_eq!((&bounce["max_mapped"], &bounce["budget"]), (&json!(8192), &json!(0)));
}

#[test]
fn fields_of_a_newer_client_are_ignored_and_logged() {
    let carom = Carom::start();
    let config = json!({"payload": {"kernel": "/k", "flavour": 1}, "colour": {"red": 1}, "devices": [{"path": "/d", "x": null}]});
    assert_eq!(carom.request("PUT", "vm.create", Some(&config)).0, 204);
    let (_, info) = carom.request("GET", "vm.info", None);
    assert_eq!((&info["config"]["colour"], &info["config"]["payload"]["kernel"]), (&Value::Null, &json!("/k")));
    assert_eq!(carom.request("PUT", "vm.resize", Some(&json!({"desired_disk": 1}))).0, 204);
    // A known field with an unsupported value is still an error.
    assert_eq!(carom.request("PUT", "vm.add-device", Some(&json!({"path": "/e", "pci_segment": 1}))).0, 400);
}

#[test]
fn second_device_with_an_id_or_a_path_is_a_conflict() {
    let carom = Carom::start();
    let config = |devices: Value| json!({"payload": {"kernel": "/k"}, "devices": devices});
    for devices in
        [json!([{"path": "/d"}, {"path": "/d"}]), json!([{"path": "/d", "id": "a"}, {"path": "/e", "id": "a"}])]
    {
        assert_eq!(carom.request("PUT", "vm.create", Some(&config(devices))).0, 409);
    }
    assert_eq!(carom.request("PUT", "vm.create", Some(&config(json!([{"path": "/d", "id": "a"}])))).0, 204);
    for device in [json!({"path": "/d"}), json!({"path": "/e", "id": "a"})] {
        let (status, error) = carom.request("PUT", "vm.add-device", Some(&device));
        assert_eq!(status, 409, "{error}");
    }
    assert_eq!(carom.request("PUT", "vm.add-device", Some(&json!({"path": "/e", "id": "_x"}))).0, 400);
}

#[test]
fn document_and_metrics_are_served() {
    let carom = Carom::start();
    let (status, document) = carom.request("GET", "openapi.json", None);
    assert_eq!((status, &document["info"]["title"]), (200, &json!("Carom")));
    for wanted in ["none", "created"] {
        let mut stream = carom.connect();
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(
            answer.starts_with("HTTP/1.1 200") && answer.contains("Content-Type: text/plain; version=0.0.4"),
            "{answer}"
        );
        assert!(answer.contains(&format!("carom_vm_state{{state=\"{wanted}\"}} 1")), "{answer}");
        carom.request("PUT", "vm.create", Some(&json!({"payload": {"kernel": "/k"}})));
    }
}

#[test]
fn mistakes_are_answered_with_what_is_wrong() {
    let carom = Carom::start();
    let create = |config: &Value| {
        let (status, error) = carom.request("PUT", "vm.create", Some(config));
        assert_eq!(status, 400, "{config}");
        error[0].as_str().unwrap().to_string()
    };
    assert!(create(&json!({"payload": {"kernel": "/k"}, "tpm": {"socket": "/s"}})).starts_with("tpm: "));
    assert!(create(&json!({"payload": {"kernel": "/k"}, "cpus": {"boot_vcpus": 0}})).starts_with("cpus.boot_vcpus: 0"));
    let beside = create(&json!({"payload": {"kernel": "/k"}, "devices": [{"path": "/d"}], "iommu_bounce": {}}));
    assert!(beside.starts_with("iommu_bounce: needs") && !beside.contains("--"), "{beside}");
    assert_eq!(carom.request("POST", "vm.info", None).0, 405);
    assert_eq!(carom.request("GET", "vm.boot", None).0, 405);
    assert_eq!(carom.request("GET", "vm.nonsense", None).0, 404);
    let (status, error) = carom.request("PUT", "vm.boot", Some(&json!({})));
    assert_eq!((status, error[0].as_str()), (400, Some("a request for vm.boot must have no body")));
}

#[test]
fn several_requests_on_one_connection_are_answered_in_order() {
    let carom = Carom::start();
    let mut stream = carom.connect();
    for _ in 0..3 {
        send(&mut stream, "GET", "vmm.ping", None);
        send(&mut stream, "GET", "vm.info", None);
    }
    let mut reader = BufReader::new(stream);
    for _ in 0..3 {
        assert_eq!(receive(&mut reader).0, 200);
        assert_eq!(receive(&mut reader).0, 404);
    }
}

#[test]
fn answers_are_readable_for_cloud_hypervisors_clients() {
    let carom = Carom::start();
    let mut stream = carom.connect();
    stream.write_all(b"GET /api/v1/vmm.ping HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    // Cloud Hypervisor's clients parse the whole rest of the line after the version as the status number. They compare header names
    // case-sensitively.
    assert!(text.starts_with("HTTP/1.1 200 \r\n"), "{text}");
    assert!(text.contains("\r\nContent-Length: ") && text.contains("\r\nContent-Type: "), "{text}");
    stream = carom.connect();
    stream.write_all(b"PUT /api/v1/vm.boot HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    text.clear();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 404 \r\n"), "{text}");
}

#[test]
fn event_pipe_without_a_reader_blocks_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("api.sock");
    let (reader, writer) = std::io::pipe().unwrap();
    // The shell passes its standard input on as descriptor 7.
    let child = Command::new("sh")
        .args([
            "-c",
            "exec \"$0\" --event-monitor fd=7 --api-socket \"$1\" 7>&0 0</dev/null",
            env!("CARGO_BIN_EXE_carom"),
        ])
        .arg(&socket)
        .stdin(Stdio::from(writer))
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut carom = Carom::new(child, socket, dir);
    let config = json!({"payload": {"kernel": "/k"}});
    // Each round writes about 100 bytes of events, so that the rounds fill the pipe (64 KiB) more than once.
    for _ in 0..3000 {
        assert_eq!(carom.request("PUT", "vm.create", Some(&config)).0, 204);
        assert_eq!(carom.put("vm.delete").0, 204);
    }
    assert_eq!(carom.put("vmm.shutdown").0, 204);
    assert!(carom.wait().success());
    drop(reader);
}

#[test]
fn descriptor_for_events_must_be_writable() {
    let output = Command::new("sh")
        .args(["-c", "exec \"$0\" --kernel /k --event-monitor fd=7 7</dev/null", env!("CARGO_BIN_EXE_carom")])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("--event-monitor fd=7: the file is not open for writing"), "{text}");
}

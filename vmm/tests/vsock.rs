// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The socket of a real `carom` process on which the host's programs reach the guest: when it is there, and when it is not.
//!
//! The guest has a few instructions, and no driver. Where there is no `/dev/kvm` that this process may use, this test does nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod echo_guest;
mod http;
mod tiny_guest;

use std::fs::{self, OpenOptions};
use std::io::BufReader;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use echo_guest::ECHO;
use http::PATIENCE;
use tiny_guest::elf;

/// A process that is gone at the end of the test.
struct Carom(Child);

impl Drop for Carom {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Status and answer of a call.
fn put(dir: &Path, name: &str, body: &Value) -> (u16, Value) {
    let mut stream = http::connect(&dir.join("api.sock"));
    http::send(&mut stream, "PUT", name, Some(body).filter(|body| !body.is_null()));
    let (status, body) = http::receive(&mut BufReader::new(stream));
    (status, if body.is_empty() { Value::Null } else { serde_json::from_slice(&body).unwrap() })
}

fn wait_until(mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE);
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn socket_is_there_as_long_as_its_device() {
    if let Err(error) = OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        return eprintln!("not tested: /dev/kvm: {error}");
    }
    let dir = tempfile::tempdir().unwrap();
    let (dir, socket) = (dir.path(), dir.path().join("vsock"));
    fs::write(dir.join("kernel"), elf(ECHO)).unwrap();
    let child = Command::new(env!("CARGO_BIN_EXE_carom"))
        .arg("--api-socket")
        .arg(dir.join("api.sock"))
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let mut carom = Carom(child);
    wait_until(|| UnixStream::connect(dir.join("api.sock")).is_ok());
    let none = Value::Null;
    let config = json!({
        "payload": {"kernel": dir.join("kernel")},
        "memory": {"size": 64 << 20},
        "serial": {"mode": "Null"},
        "vsock": {"cid": 3, "socket": socket},
    });
    assert_eq!(put(dir, "vm.create", &config), (204, Value::Null));
    assert!(!socket.exists(), "it is not booted");

    // What is there is left as it is.
    fs::write(&socket, "something").unwrap();
    let rule = "something that is no socket is there";
    let refused = json!([format!("vsock.socket: {}: {rule}", socket.display())]);
    assert_eq!(put(dir, "vm.boot", &none), (400, refused));
    assert_eq!(fs::read(&socket).unwrap(), b"something");
    fs::remove_file(&socket).unwrap();

    // So is a socket that another process serves.
    let other = UnixListener::bind(&socket).unwrap();
    let refused = json!([format!("vsock.socket: {}: another process serves this socket", socket.display())]);
    assert_eq!(put(dir, "vm.boot", &none), (400, refused));
    assert!(UnixStream::connect(&socket).is_ok());
    // The first boot replaces a socket without a server, such as that of a killed process.
    drop(other);
    assert!(socket.exists());

    for _ in 0..2 {
        assert_eq!(put(dir, "vm.boot", &none), (204, Value::Null));
        assert!(UnixStream::connect(&socket).is_ok());
        let second = json!({"cid": 4, "socket": dir.join("second"), "id": "second"});
        assert_eq!(put(dir, "vm.add-vsock", &second), (400, json!(["vsock: the VM has one already"])));
        assert_eq!(put(dir, "vm.reboot", &none), (204, Value::Null));
        assert!(UnixStream::connect(&socket).is_ok());
        assert_eq!(put(dir, "vm.shutdown", &none), (204, Value::Null));
        assert!(!socket.exists());
    }

    // Without it the VM boots too, and it comes while the guest runs, and goes with a reset, as the guest lets go of nothing.
    assert_eq!(put(dir, "vm.remove-device", &json!({"id": "_vsock"})), (204, Value::Null));
    assert_eq!(put(dir, "vm.boot", &none), (204, Value::Null));
    assert!(!socket.exists());
    let (status, answer) = put(dir, "vm.add-vsock", &config["vsock"]);
    assert_eq!((status, answer["id"].as_str()), (200, Some("_vsock")), "{answer}");
    assert!(UnixStream::connect(&socket).is_ok());
    assert_eq!(put(dir, "vm.remove-device", &json!({"id": "_vsock"})), (204, Value::Null));
    let other = json!({"cid": 4, "socket": dir.join("other"), "id": "other"});
    assert_eq!(put(dir, "vm.add-vsock", &other), (400, json!(["vsock: the VM has one already"])));
    assert_eq!(put(dir, "vm.reboot", &none), (204, Value::Null));
    wait_until(|| !socket.exists());
    assert_eq!(put(dir, "vm.add-vsock", &other).0, 200);

    assert_eq!(put(dir, "vmm.shutdown", &none), (204, Value::Null));
    wait_until(|| carom.0.try_wait().unwrap().is_some());
    assert!(!dir.join("other").exists());
}

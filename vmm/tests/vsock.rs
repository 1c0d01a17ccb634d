// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests when a real `carom` process creates and removes its vsock socket. Host programs connect to the guest through this socket.
//!
//! The guest consists of a few instructions and has no driver. Without access to `/dev/kvm`, this test does nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod echo_guest;
mod http;
#[expect(dead_code, reason = "shared by tests that end the program by a signal")]
mod program;
mod tiny_guest;

use std::fs;
use std::os::unix::net::{UnixListener, UnixStream};

use serde_json::{Value, json};

use echo_guest::ECHO;
use program::{call, put, start, wait_until};
use tiny_guest::elf;

#[test]
fn socket_exists_as_long_as_its_device() {
    let dir = tempfile::tempdir().unwrap();
    let (dir, socket) = (dir.path(), dir.path().join("vsock"));
    let Some(mut carom) = start(dir, &[]) else { return };
    fs::write(dir.join("kernel"), elf(ECHO)).unwrap();
    let ask = |name: &str, body: &Value| call(dir, "PUT", name, Some(body));
    let config = json!({
        "payload": {"kernel": dir.join("kernel")},
        "memory": {"size": 64 << 20},
        "serial": {"mode": "Null"},
        "vsock": {"cid": 3, "socket": socket},
    });
    put(dir, "vm.create", Some(&config));
    assert!(!socket.exists(), "the VM is not booted");

    // The program does not change an existing file.
    fs::write(&socket, "something").unwrap();
    let rule = "the path names a file that is not a socket: remove the file, or use another path";
    let refused = json!([format!("vsock.socket: {}: {rule}", socket.display())]);
    assert_eq!(call(dir, "PUT", "vm.boot", None), (400, refused));
    assert_eq!(fs::read(&socket).unwrap(), b"something");
    fs::remove_file(&socket).unwrap();

    // The program does not change an existing socket of another process either.
    let other = UnixListener::bind(&socket).unwrap();
    let refused =
        json!([format!("vsock.socket: {}: another process serves this socket: use another path", socket.display())]);
    assert_eq!(call(dir, "PUT", "vm.boot", None), (400, refused));
    assert!(UnixStream::connect(&socket).is_ok());
    // The first boot replaces a socket without a server, such as the socket of a killed process.
    drop(other);
    assert!(socket.exists());

    for _ in 0..2 {
        put(dir, "vm.boot", None);
        assert!(UnixStream::connect(&socket).is_ok());
        let second = json!({"cid": 4, "socket": dir.join("second"), "id": "second"});
        assert_eq!(
            ask("vm.add-vsock", &second),
            (400, json!(["vsock: the VM already has such a device: remove the old device first"]))
        );
        put(dir, "vm.reboot", None);
        assert!(UnixStream::connect(&socket).is_ok());
        put(dir, "vm.shutdown", None);
        assert!(!socket.exists());
    }

    // Boot the VM without the device, and hot-plug the device later. The guest does not release devices, so a removal is complete only
    // after a reset.
    put(dir, "vm.remove-device", Some(&json!({"id": "_vsock"})));
    put(dir, "vm.boot", None);
    assert!(!socket.exists());
    let (status, answer) = ask("vm.add-vsock", &config["vsock"]);
    assert_eq!((status, answer["id"].as_str()), (200, Some("_vsock")), "{answer}");
    assert!(UnixStream::connect(&socket).is_ok());
    put(dir, "vm.remove-device", Some(&json!({"id": "_vsock"})));
    let other = json!({"cid": 4, "socket": dir.join("other"), "id": "other"});
    assert_eq!(
        ask("vm.add-vsock", &other),
        (400, json!(["vsock: the VM already has such a device: remove the old device first"]))
    );
    put(dir, "vm.reboot", None);
    wait_until("the socket is removed", || !socket.exists());
    assert_eq!(ask("vm.add-vsock", &other).0, 200);

    put(dir, "vmm.shutdown", None);
    carom.ended();
    assert!(!dir.join("other").exists());
}

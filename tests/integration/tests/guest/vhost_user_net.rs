// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Network cards whose packets another process moves (vhost-user): `net-server`, between the guest's queues and a tap interface.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use carom_integration::api::ApiVmm;
use carom_integration::harness::guest_test;
use serde_json::{Value, json};

use crate::api::BOOT_TIME;
use crate::hotplug::{create, put, wait_gone};
use crate::net::{counter, job};
use crate::support::tap::open_tap;
use crate::support::{MIB, SITE};
use crate::vhost_user::Server;

/// The server on `tap`, which stays when the server goes.
fn net_server(tap: &File, socket: &Path, options: &[&str]) -> Server {
    let mut command = Command::new(env!("CARGO_BIN_EXE_net-server"));
    command.arg("--socket").arg(socket).args(options).stdin(tap.try_clone().unwrap());
    Server::start(&mut command, socket)
}

/// Waits until the guest has had so many more bytes back than before, all of them right.
fn wait_for_traffic(vmm: &ApiVmm, times: usize) {
    let before = vmm.console().matches("CAROM-SAME large").count();
    vmm.wait_for("CAROM-SAME large", before + times, BOOT_TIME).unwrap();
}

/// As long as the card is there, and when it comes again: bytes that go and come back.
const TRAFFIC: &str = r#"
while :; do
    wait_for_card
    while [ -e /sys/class/net/eth0 ]; do large; done 2>/dev/null
    echo CAROM-GONE
    while [ ! -e /sys/class/net/eth0/device ]; do sleep 0.1; done
done
"#;

#[guest_test]
fn card_of_a_server_works_goes_on_with_the_next_one_and_comes_again() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("net.sock");
    let tap = open_tap("caromserved", "10.77.8.1");
    let server = net_server(&tap, &socket, &["--queues", "4"]);
    let vmm = ApiVmm::start(&SITE, &job("10.77.8", TRAFFIC).replace("nc -w 60", "nc -w 10")).unwrap();
    let card = json!({"vhost_user": true, "vhost_socket": socket, "num_queues": 4, "id": "card"});
    let memory = json!({"size": 512 * MIB, "shared": true});
    create(&vmm, json!({"net": [card], "memory": memory, "cpus": {"boot_vcpus": 2, "max_vcpus": 2}}));
    put(&vmm, "vm.boot", &Value::Null);
    wait_for_traffic(&vmm, 1);
    let (_, info) = vmm.call("GET", "/api/v1/vm.info", None).unwrap();
    let told = &info["config"]["net"][0];
    assert_eq!((&told["vhost_user"], &told["vhost_mode"]), (&json!(true), &json!("Client")), "{told}");
    put(&vmm, "vm.pause", &Value::Null);
    put(&vmm, "vm.resume", &Value::Null);
    wait_for_traffic(&vmm, 2);

    drop(server);
    let _server = net_server(&tap, &socket, &["--queues", "4"]);
    let start = Instant::now();
    while counter(&vmm, "card", "server_connections") < 2 {
        assert!(start.elapsed() < Duration::from_secs(20), "the next server has not been found");
    }
    wait_for_traffic(&vmm, 2);
    assert_eq!((counter(&vmm, "card", "server_losses"), counter(&vmm, "card", "server_refusals")), (1, 0));

    put(&vmm, "vm.remove-device", &json!({"id": "card"}));
    wait_gone(&vmm, "card");
    vmm.wait_for("CAROM-GONE", 1, BOOT_TIME).unwrap();
    let again = json!({"vhost_user": true, "vhost_socket": socket, "id": "again"});
    let (status, answer) = vmm.call("PUT", "/api/v1/vm.add-net", Some(&again)).unwrap();
    assert_eq!(status, 200, "{answer}");
    wait_for_traffic(&vmm, 1);
    assert_eq!(counter(&vmm, "again", "server_losses"), 0);
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Network cards that another process serves (vhost-user). The process is `device-server`, which moves packets between the
//! guest's queues and a tap interface.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use carom_integration::api::ApiVmm;
use carom_integration::harness::guest_test;
use carom_tools::children::KilledOnDrop;
use serde_json::{Value, json};

use crate::api::BOOT_TIME;
use crate::hotplug::{create_and_boot, put, wait_gone};
use crate::net::{counter, job, job_of};
use crate::support::server::serve;
use crate::support::tap::open_tap;
use crate::support::{MIB, SITE};
use crate::vhost_user::storage_daemon;

/// Starts the server on `tap`. The interface continues to exist when the server ends.
fn card_server(tap: &File, socket: &Path, options: &[&str]) -> KilledOnDrop {
    let mut command = Command::new(env!("CARGO_BIN_EXE_device-server"));
    command.arg("--socket").arg(socket).args(options).stdin(tap.try_clone().unwrap());
    serve(&mut command, socket)
}

/// Waits for `times` more transfers in which the guest gets all bytes back unchanged.
fn wait_for_traffic(vmm: &ApiVmm, times: usize) {
    let before = vmm.console().matches("CAROM-SAME large").count();
    vmm.wait_for("CAROM-SAME large", before + times, BOOT_TIME).unwrap();
}

/// Job that repeatedly sends bytes to the host and compares the returned bytes, whenever the card exists.
const TRAFFIC: &str = r#"
while :; do
    wait_for_card
    while [ -e /sys/class/net/eth0 ]; do
        large
        echo CAROM-LIVES
    done 2>/dev/null
    echo CAROM-GONE
    while [ ! -e /sys/class/net/eth0/device ]; do sleep 0.1; done
done
"#;

#[guest_test(slow = "unit tests cover lost and new servers, and the tests of cards behind the IOMMU cover the traffic")]
fn server_card_survives_a_new_server_and_a_replug() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("net.sock");
    let tap = open_tap("caromserved", "10.77.8.1");
    let server = card_server(&tap, &socket, &["--queues", "4"]);
    let vmm = ApiVmm::start(&SITE, &job("10.77.8", TRAFFIC).replace("nc -w 60", "nc -w 10")).unwrap();
    let card = json!({"vhost_user": true, "vhost_socket": socket, "num_queues": 4, "id": "card"});
    let memory = json!({"size": 512 * MIB, "shared": true});
    create_and_boot(&vmm, json!({"net": [card], "memory": memory, "cpus": {"boot_vcpus": 2, "max_vcpus": 2}}));
    wait_for_traffic(&vmm, 1);
    let (_, info) = vmm.call("GET", "/api/v1/vm.info", None).unwrap();
    let reported = &info["config"]["net"][0];
    assert_eq!((&reported["vhost_user"], &reported["vhost_mode"]), (&json!(true), &json!("Client")), "{reported}");
    put(&vmm, "vm.pause", &Value::Null);
    put(&vmm, "vm.resume", &Value::Null);
    wait_for_traffic(&vmm, 2);

    drop(server);
    let _server = card_server(&tap, &socket, &["--queues", "4"]);
    let start = Instant::now();
    while counter(&vmm, "card", "server_connections") < 2 {
        assert!(start.elapsed() < Duration::from_secs(60), "the next server has not been found");
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

/// Number of bytes that a guest with the card behind the virtio-iommu sends to the host, and that the host sends back.
const BYTES: u64 = 512 * 1024;

/// Boots a guest whose card is behind the virtio-iommu, and starts the card's server. The server's stdout is the file `said` in
/// `dir`.
fn boot_behind_iommu(dir: &Path, address: &str, options: &[&str], config: &Value) -> (ApiVmm, KilledOnDrop) {
    let socket = dir.join("net.sock");
    let tap = open_tap("caromiommu", &format!("{address}.1"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_device-server"));
    command.arg("--socket").arg(&socket).arg("--iommu").args(options).stdin(tap);
    command.stdout(File::create(dir.join("said")).unwrap());
    let server = serve(&mut command, &socket);
    // The VMM and the server exchange messages for each packet, so this test uses fewer bytes than other tests.
    let script = job_of(address, BYTES, TRAFFIC).replace("nc -w 60", "nc -w 10");
    let vmm = ApiVmm::start(&SITE, &script).unwrap();
    let card = json!({"vhost_user": true, "vhost_socket": socket, "id": "card", "iommu": true});
    let mut vm = json!({"net": [card], "memory": {"size": 512 * MIB, "shared": true}});
    if !config["iommu_bounce"].is_null() {
        vm["iommu_bounce"] = config["iommu_bounce"].clone();
    }
    create_and_boot(&vmm, vm);
    (vmm, server)
}

#[guest_test(slow = "the test with a window covers the messages, and unit tests cover rejected accesses")]
fn card_of_a_server_behind_iommu_reaches_only_what_is_mapped() {
    let dir = tempfile::tempdir().unwrap();
    // The guest maps nothing at this address: its driver uses addresses below 4 GiB.
    let probe = (1u64 << 40).to_string();
    let (vmm, _server) = boot_behind_iommu(dir.path(), "10.77.9", &["--probe", &probe], &json!({}));
    wait_for_traffic(&vmm, 1);
    assert_eq!(std::fs::read_to_string(dir.path().join("said")).unwrap(), "denied 0x10000000000\n");
    assert_eq!(counter(&vmm, "_iommu", "faults"), 1, "the fault was not reported exactly once");
    assert!(counter(&vmm, "_iommu", "requests_unmap") > 300, "not every buffer was unmapped");
    assert_eq!((counter(&vmm, "card", "server_losses"), counter(&vmm, "card", "server_refusals")), (0, 0));
}

#[guest_test(needs(StorageDaemon))]
fn card_of_a_server_behind_the_iommu_uses_a_window() {
    let dir = tempfile::tempdir().unwrap();
    let config = json!({"iommu_bounce": {"size": 64 * MIB}});
    let (vmm, _server) = boot_behind_iommu(dir.path(), "10.77.10", &[], &config);
    wait_for_traffic(&vmm, 1);
    assert!(counter(&vmm, "_iommu", "window_bytes") > 0, "the card has no window");
    assert_eq!((counter(&vmm, "_iommu", "faults"), counter(&vmm, "card", "server_losses")), (0, 0));

    let (image, socket) = (dir.path().join("disk.img"), dir.path().join("disk.sock"));
    File::create_new(&image).unwrap().set_len(MIB).unwrap();
    let _plain = storage_daemon(&image, &socket);
    let disk = json!({"vhost_user": true, "vhost_socket": socket, "iommu": true});
    let (status, answer) = vmm.call("PUT", "/api/v1/vm.add-disk", Some(&disk)).unwrap();
    assert!(status == 400 && answer.to_string().contains("VIRTIO_F_ACCESS_PLATFORM"), "{status} {answer}");
}

#[guest_test(slow = "unit tests cover a server that does not confirm")]
fn server_that_keeps_translations_fails_the_card_in_time() {
    let dir = tempfile::tempdir().unwrap();
    let (vmm, _server) = boot_behind_iommu(dir.path(), "10.77.11", &["--never-confirm"], &json!({}));
    let start = Instant::now();
    while counter(&vmm, "card", "server_losses") == 0 {
        assert!(start.elapsed() < BOOT_TIME, "the server was not disconnected");
    }
    // The guest continues, because its vCPU waits for the server for only a few seconds.
    let before = vmm.console().matches("CAROM-LIVES").count();
    vmm.wait_for("CAROM-LIVES", before + 1, BOOT_TIME).unwrap();
}

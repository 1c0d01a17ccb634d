// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tap interface that is deleted while a guest uses it.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::Duration;

use carom_integration::api::ApiVmm;
use carom_integration::harness::guest_test;
use serde_json::{Value, json};

use crate::api::BOOT_TIME;
use crate::hotplug::{create_and_boot, end, put, wait_gone};
use crate::net::{counter, job};
use crate::support::SITE;

const TAP: &str = "caromgone";

/// Job that uses the card without pauses, and continues after the card has been removed.
const WORK: &str = r#"
wait_for_card
large
(while :; do ping -c 1 -W 1 -q NET.1 >/dev/null 2>&1 || sleep 0.1; done) &
(while :; do nc -w 2 NET.1 PORT </tmp/sent >/dev/null 2>&1; done) &
echo CAROM-READY
while [ -e /sys/class/net/eth0 ]; do sleep 0.1; done
echo CAROM-GONE
n=0
while :; do n=$((n + 1)); echo "CAROM-LIVES $n"; sleep 0.5; done
"#;

/// Returns the CPU time of the card's queue threads, in nanoseconds.
fn time_of_threads(pid: u32) -> u64 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap().map(|entry| entry.unwrap().path());
    let named = tasks.filter(|task| fs::read_to_string(task.join("comm")).unwrap().starts_with("card_"));
    let statistics = named.map(|task| fs::read_to_string(task.join("schedstat")).unwrap());
    statistics.map(|text| text.split(' ').next().unwrap().parse::<u64>().unwrap()).sum()
}

#[guest_test(slow = "the unit test vanished_interface_* covers a file with the same errors")]
fn guest_outlives_its_deleted_interface_and_releases_its_card() {
    let mut vmm = ApiVmm::start(&SITE, &job("10.77.9", WORK)).unwrap();
    create_and_boot(&vmm, json!({"net": [{"tap": TAP, "ip": "10.77.9.1", "id": "card"}]}));
    vmm.wait_for("CAROM-READY", 1, BOOT_TIME).unwrap();
    vmm.wait_for("CAROM-SAME large", 1, BOOT_TIME).unwrap();

    assert!(Command::new("ip").args(["link", "del", TAP]).status().unwrap().success());
    thread::sleep(Duration::from_secs(1));
    let (before, dropped) = (time_of_threads(vmm.pid()), counter(&vmm, "card", "tx_dropped"));
    thread::sleep(Duration::from_secs(4));
    let took = Duration::from_nanos(time_of_threads(vmm.pid()) - before);
    assert!(took < Duration::from_millis(800), "the card's threads took {took:?} of 4 s");
    assert!(counter(&vmm, "card", "tx_dropped") > dropped, "the guest still sends");
    let said = vmm.said();
    assert_eq!(said.matches("interface was deleted").count(), 1, "{said}");

    for operation in ["vm.pause", "vm.resume"] {
        put(&vmm, operation, &Value::Null);
    }
    put(&vmm, "vm.remove-device", &json!({"id": "card"}));
    wait_gone(&vmm, "card");
    vmm.wait_for("CAROM-LIVES 2", 1, BOOT_TIME).unwrap();
    end(&mut vmm);
    // In addition to the deletion, the VMM may report one error, for a packet that arrived while the interface was down.
    assert!(vmm.said().matches("card: ").count() <= 2, "{}", vmm.said());
}

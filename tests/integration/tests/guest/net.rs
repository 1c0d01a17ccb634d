// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! virtio-net: a real guest's network card on a tap interface. Three cases are tested: the card is not behind the virtio-iommu,
//! is behind it without windows, or is behind it with a window.

use std::fs::File;
use std::path::PathBuf;
use std::process::Command;

use carom_integration::api::ApiVmm;
use carom_integration::devices::{Peer, echo_server};
use carom_integration::harness::guest_test;
use carom_integration::{Guest, Outcome};
use serde_json::{Value, json};

use crate::api::BOOT_TIME;
use crate::hotplug::{create, create_and_boot, end, go_on_in_another_process, put, wait_gone};
use crate::support::tap::{open_tap, put_with_descriptors};
use crate::support::{MIB, SITE, run};

/// Number of bytes that the guest sends to the host, and that the host sends back.
const TRAFFIC: u64 = 4 * MIB;

/// Returns a job that runs the shell lines `work` on a network. `net` contains the first three numbers of the network's
/// addresses.
pub(crate) fn job(net: &str, work: &str) -> String {
    job_of(net, TRAFFIC, work)
}

/// Like [`job`], but sends `bytes` bytes to the host and back.
pub(crate) fn job_of(net: &str, bytes: u64, work: &str) -> String {
    let port = echo_server().unwrap();
    let (own, server) = (format!("{net}.2"), format!("{net}.1"));
    let functions = Peer { own: &own, server: &server, port, bytes }.functions();
    format!("{functions}\n{}", work.replace("NET", net).replace("PORT", &port.to_string()))
}

fn echoed(guest: Guest, net: &str, options: &str) -> Outcome {
    let work =
        "wait_for_card\nlarge\nsmall\nping -c 3 -q NET.1 && echo CAROM-SAME ping\necho CAROM-MARK net\nsleep 0.5\n";
    let card = format!("ip={net}.1,mac=02:00:00:00:00:17{options}");
    let outcome = run(&guest.net(&card).job(&job(net, work)));
    let same: Vec<&str> = outcome.values("CAROM-SAME").collect();
    assert_eq!(same, ["large", "small", "ping"], "console:\n{}", outcome.console);
    outcome
}

#[guest_test]
fn bytes_go_to_the_host_and_back_without_iommu() {
    let outcome = echoed(Guest::new("net-beside"), "10.77.1", "");

    assert!(outcome.counters.is_empty(), "the VM has a virtio-iommu, but needs none");
}

#[guest_test(slow = "card_behind_the_iommu_is_served_through_a_window covers the card, and rng:: covers mappings")]
fn card_behind_the_iommu_works_through_mappings() {
    let outcome = echoed(Guest::new("net-mapped").cmdline("iommu.strict=1"), "10.77.2", ",iommu=on");

    let host = outcome.counters.last().expect("the mark made the VMM report its counters");
    assert!(host.requests.maps() > 500 && host.requests.unmap > 500, "not every buffer was mapped: {host:?}");
    assert_eq!((host.faults, host.window_bytes), (0, 0));
}

#[guest_test]
fn card_behind_the_iommu_is_served_through_a_window() {
    let guest = Guest::new("net-window").cmdline("iommu.strict=1").bounce("size=64M");
    let outcome = echoed(guest, "10.77.3", ",iommu=on");

    let host = outcome.counters.last().expect("the mark made the VMM report its counters");
    assert!(host.requests.window_add > 0 && host.peak_window_bytes > 0, "the card had no window: {host:?}");
    assert_eq!(host.faults, 0);
    println!("net-window: {} MAP, {} WINDOW_ADD", host.requests.maps(), host.requests.window_add);
}

#[guest_test]
fn two_vcpus_use_two_pairs_of_queues() {
    let work = "wait_for_card\nseveral\necho \"CAROM-QUEUES $(ls -d /sys/class/net/eth0/queues/tx-* | wc -l)\"\nlarge
awk '$1 == \"NET.1\" { print \"CAROM-NEIGHBOUR \" $4 }' /proc/net/arp\n";
    let guest =
        Guest::new("net-queues").cpus(2).net("ip=10.77.4.1,num_queues=4,queue_size=512,host_mac=02:00:00:00:00:99");
    let outcome = run(&guest.job(&job("10.77.4", work)));

    let same: Vec<&str> = outcome.values("CAROM-SAME").collect();
    assert_eq!(same, [["one of several"; 4].as_slice(), &["large"]].concat(), "console:\n{}", outcome.console);
    assert_eq!(outcome.value("CAROM-QUEUES").unwrap(), "2");
    assert_eq!(outcome.value("CAROM-NEIGHBOUR").unwrap(), "02:00:00:00:00:99");
}

pub(crate) fn counter(vmm: &ApiVmm, id: &str, name: &str) -> u64 {
    let (status, counters) = vmm.call("GET", "/api/v1/vm.counters", None).unwrap();
    assert_eq!(status, 200, "{counters}");
    counters[id][name].as_u64().unwrap_or_else(|| panic!("{id} {name}: {counters}"))
}

/// Returns the number of host interfaces whose names begin with `prefix`.
fn interfaces(prefix: &str) -> usize {
    let entries = std::fs::read_dir("/sys/class/net").unwrap();
    entries.filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().starts_with(prefix)).count()
}

/// Job that uses the card each time it is added: it sends bytes to the host and compares the returned bytes. Then it keeps
/// sending until the card is removed.
const USE_WHENEVER_THERE: &str = r#"
echo CAROM-READY
n=0
while :; do
    while [ ! -e /sys/class/net/eth0/device ]; do sleep 0.1; done
    wait_for_card
    large
    n=$((n + 1))
    (while [ -e /sys/class/net/eth0 ]; do nc -w 5 NET.1 PORT </tmp/sent >/dev/null; done) 2>/dev/null &
    echo "CAROM-WORKED $n"
    while [ -e /sys/class/net/eth0 ]; do sleep 0.1; done
    echo "CAROM-GONE $n"
done
"#;

#[guest_test(slow = "disk:: covers hotplug of another device")]
fn card_is_added_and_removed_while_it_is_used() {
    let mut vmm = ApiVmm::start(&SITE, &job("10.77.5", USE_WHENEVER_THERE)).unwrap();
    create_and_boot(&vmm, json!({"iommu_bounce": {"size": 16 * MIB}}));
    vmm.wait_for("CAROM-READY", 1, BOOT_TIME).unwrap();
    for (round, iommu, slot) in [(1, true, "0000:00:02.0"), (2, false, "0000:00:12.0")] {
        let card = json!({"tap": "caromtap", "ip": "10.77.5.1", "id": "card", "iommu": iommu});
        let (status, added) = vmm.call("PUT", "/api/v1/vm.add-net", Some(&card)).unwrap();
        assert_eq!((status, &added), (200, &json!({"id": "card", "bdf": slot})));
        let again = json!({"tap": "caromtap", "id": "other"});
        let (status, message) = vmm.call("PUT", "/api/v1/vm.add-net", Some(&again)).unwrap();
        assert!(status == 409 && message.to_string().contains("net.tap"), "{status}: {message}");
        vmm.wait_for(&format!("CAROM-WORKED {round}\n"), 1, BOOT_TIME).unwrap();
        vmm.wait_for("CAROM-SAME large", round, BOOT_TIME).unwrap();
        assert!(counter(&vmm, "card", "rx_bytes") > TRAFFIC);
        assert!(counter(&vmm, "card", "tx_bytes") > TRAFFIC);
        assert_eq!(interfaces("caromtap"), 1);
        put(&vmm, "vm.remove-device", &json!({"id": "card"}));
        vmm.wait_for(&format!("CAROM-GONE {round}\n"), 1, BOOT_TIME).unwrap();
        wait_gone(&vmm, "card");
        assert_eq!(interfaces("caromtap"), 0, "the VMM did not remove its interface");
    }
    assert_eq!(counter(&vmm, "_iommu", "faults"), 0);
    end(&mut vmm);
}

#[guest_test(
    slow = "card_on_a_macvtap_interface_* covers a descriptor, snapshot:: covers restored guests, and unit tests cover net_fds"
)]
fn card_with_a_client_descriptor_is_restored_with_another() {
    // Each connection is lost when its interface is removed. A short timeout makes the guest soon open the next connection.
    let job =
        job("10.77.6", "wait_for_card\necho CAROM-READY\nwhile :; do large; done\n").replace("nc -w 60", "nc -w 5");
    let mut vmm = ApiVmm::start(&SITE, &job).unwrap();
    create(&vmm, json!({}));
    let card = json!({"id": "card", "mac": "02:00:00:00:00:18", "ip": "10.9.9.9", "mask": "255.255.255.0"});
    let (status, message) = put_with_descriptors(&vmm.socket(), "vm.add-net", &card, &[]);
    assert_eq!((status, message.as_str()), (204, ""));
    put(&vmm, "vm.remove-device", &json!({"id": "card"}));
    let tap = open_tap("caromfd", "10.77.6.1");
    let null = File::open("/dev/null").unwrap();
    let (status, message) = put_with_descriptors(&vmm.socket(), "vm.add-net", &card, &[&tap, &null]);
    assert!(
        status == 400 && message.contains("net.fds: 2 descriptors were passed instead of 1"),
        "{status}: {message}"
    );
    let (status, message) = put_with_descriptors(&vmm.socket(), "vm.add-net", &card, &[&tap]);
    assert_eq!((status, message.as_str()), (204, ""));
    // The VM has its own duplicate of the descriptor.
    drop(tap);
    put(&vmm, "vm.boot", &Value::Null);
    vmm.wait_for("CAROM-READY", 1, BOOT_TIME).unwrap();
    vmm.wait_for("CAROM-SAME large", 1, BOOT_TIME).unwrap();
    put(&vmm, "vm.pause", &Value::Null);
    let url = format!("file://{}", vmm.dir().join("snapshot").display());
    put(&vmm, "vm.snapshot", &json!({"destination_url": url}));
    put(&vmm, "vm.delete", &Value::Null);
    let restore = |body: Value, files: &[&File]| put_with_descriptors(&vmm.socket(), "vm.restore", &body, files);
    let (status, message) = restore(json!({"source_url": url}), &[]);
    assert!(
        status == 400 && message.contains("net_fds: network device 'card' was saved with 1 descriptors"),
        "{status}: {message}"
    );
    let wanted = json!({"source_url": url, "net_fds": [{"id": "card", "num_fds": 1, "fds": [9]}], "resume": true});
    let (status, message) = restore(wanted.clone(), &[]);
    assert!(
        status == 400 && message.contains("net_fds: the request has no descriptors for 'card'"),
        "{status}: {message}"
    );
    let (status, message) = restore(wanted.clone(), &[&null, &null]);
    assert!(status == 400 && message.contains("net_fds: 2 descriptors came"), "{status}: {message}");
    std::fs::remove_file(vmm.console_file()).unwrap();
    let tap = open_tap("caromfe", "10.77.6.1");
    let (status, message) = restore(wanted, &[&tap]);
    assert_eq!((status, message.as_str()), (204, ""));
    drop(tap);
    vmm.wait_for("CAROM-SAME large", 1, BOOT_TIME).unwrap();
    // The VM also keeps the descriptor over a shutdown and another boot.
    put(&vmm, "vm.shutdown", &Value::Null);
    put(&vmm, "vm.boot", &Value::Null);
    vmm.wait_for("CAROM-SAME large", 1, BOOT_TIME).unwrap();
    end(&mut vmm);
}

/// Two connected host interfaces. The first interface has an address. The second interface carries a macvtap interface.
struct OnAWire {
    device: PathBuf,
}

impl OnAWire {
    fn new(address: &str) -> Self {
        let ip = |words: &str| {
            let status = Command::new("ip").args(words.split(' ')).status().unwrap();
            assert!(status.success(), "ip {words}: {status}");
        };
        ip("link add caromwire0 type veth peer name caromwire1");
        ip(&format!("addr add {address}/24 dev caromwire0"));
        ip("link set caromwire0 up");
        ip("link set caromwire1 up");
        ip("link add link caromwire1 name caromvtap type macvtap mode bridge");
        let index = std::fs::read_to_string("/sys/class/net/caromvtap/ifindex").unwrap();
        Self { device: format!("/dev/tap{}", index.trim()).into() }
    }
}

impl Drop for OnAWire {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["link", "del", "caromwire0"]).status();
    }
}

#[guest_test]
fn card_on_a_macvtap_interface_works_by_name_and_descriptor() {
    let wire = OnAWire::new("10.77.8.1");
    let mut vmm =
        ApiVmm::start(&SITE, &job("10.77.8", "wait_for_card\nlarge\necho CAROM-READY\nwhile :; do sleep 1; done\n"))
            .unwrap();
    let refused = json!({"tap": "caromvtap", "host_mac": "02:00:00:00:00:21"});
    let card = json!({"tap": "caromvtap", "mac": "02:00:00:00:00:20", "id": "card"});
    create_and_boot(&vmm, json!({"net": [card]}));
    vmm.wait_for("CAROM-READY", 1, BOOT_TIME).unwrap();
    vmm.wait_for("CAROM-SAME large", 1, BOOT_TIME).unwrap();
    let address = std::fs::read_to_string("/sys/class/net/caromvtap/address").unwrap();
    assert_eq!(address.trim(), "02:00:00:00:00:20", "the interface does not have the guest's address");
    let (status, message) = vmm.call("PUT", "/api/v1/vm.add-net", Some(&refused)).unwrap();
    assert!(status >= 400, "{status}: {message}");
    put(&vmm, "vm.shutdown", &Value::Null);
    put(&vmm, "vm.delete", &Value::Null);

    create(&vmm, json!({}));
    let file = File::options().read(true).write(true).open(&wire.device).unwrap();
    let card = json!({"mac": "02:00:00:00:00:20", "id": "card"});
    let (status, message) = put_with_descriptors(&vmm.socket(), "vm.add-net", &card, &[&file]);
    assert_eq!((status, message.as_str()), (204, ""));
    drop(file);
    put(&vmm, "vm.boot", &Value::Null);
    vmm.wait_for("CAROM-SAME large", 1, BOOT_TIME).unwrap();
    end(&mut vmm);
}

#[guest_test(slow = "snapshot:: covers restored guests, and unit tests cover the state of the card")]
fn guest_continues_with_its_card_in_another_process() {
    let work = "wait_for_card\nwhile :; do large; ping -c 1 -q NET.1 >/dev/null && echo CAROM-SAME ping; done\n";
    // Between the two processes, no process serves the card, so the guest must resend data, and may lose a connection. A short
    // timeout makes the guest soon open the next connection.
    let job = job("10.77.7", work).replace("nc -w 60", "nc -w 10");
    let mut vmm = ApiVmm::start(&SITE, &job).unwrap();
    let config = json!({
        "net": [{"tap": "caromsaved", "ip": "10.77.7.1", "iommu": true, "num_queues": 4}],
        "cpus": {"boot_vcpus": 2, "max_vcpus": 2},
        "iommu_bounce": {"size": 32 * MIB},
    });
    create_and_boot(&vmm, config);
    vmm.wait_for("CAROM-SAME ping", 1, BOOT_TIME).unwrap();
    go_on_in_another_process(&mut vmm, "snapshot");
    vmm.wait_for("CAROM-SAME ping", 2, BOOT_TIME).unwrap();
    vmm.wait_for("CAROM-SAME large", 1, BOOT_TIME).unwrap();
    assert_eq!(counter(&vmm, "_iommu", "faults"), 0);
}

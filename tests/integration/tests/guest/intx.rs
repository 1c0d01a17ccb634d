// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! INTx interrupts. Two network cards share one interrupt line of the guest. A drive works in a guest without MSI, after
//! hotplug and after reboots.

use carom_integration::api::ApiVmm;
use carom_integration::harness::guest_test;
use carom_integration::workload;
use carom_integration::{Guest, Site};
use serde_json::{Value, json};

use crate::api::BOOT_TIME;
use crate::hotplug::{create_and_boot, payload, put, use_whenever_there, wait_gone};
use crate::lifecycle::three_boots;
use crate::support::{SITE, required, run};

/// MiB that the guest sends to the server, and that the server sends back.
const TRAFFIC_MIB: u64 = 1;

/// Job with two network cards, in slots 2 and 18. The first card sends random bytes to the server and receives them again.
/// Meanwhile, the job sets the second card up and down repeatedly. The second card's driver learns only from an interrupt that
/// the link is up.
const TWO_CARDS: &str = r#"
interface() {
    i=0
    while [ ! -e /sys/bus/pci/devices/$1/net ] && [ $i -lt 100 ]; do i=$((i + 1)); sleep 0.1; done
    ls /sys/bus/pci/devices/$1/net
}
link() {
    ip link set $1 up
    i=0
    while [ "$(cat /sys/class/net/$1/carrier 2>/dev/null)" != 1 ]; do
        i=$((i + 1))
        [ $i -lt 200 ] || { cat /proc/interrupts; exit 91; }
        sleep 0.1
    done
}
CARD=$(interface 0000:00:02.0)
OTHER=$(interface 0000:00:12.0)
ip addr add 10.0.2.15/24 dev $CARD
link $CARD
head -c $((MIB * 1048576)) /dev/urandom >/tmp/sent
(nc -w 60 10.0.2.100 7 </tmp/sent >/tmp/back; echo >/tmp/ended) &
for n in 1 2 3; do
    link $OTHER
    echo "CAROM-LINK $n"
    ip link set $OTHER down
done
link $OTHER
while [ ! -e /tmp/ended ]; do sleep 0.1; done
cmp /tmp/sent /tmp/back && echo CAROM-SAME
awk -v one=$CARD -v two=$OTHER '$0 ~ one && $0 ~ two { print "CAROM-LINE " $0 }' /proc/interrupts
dmesg | grep 'nobody cared' && exit 92
exit 0
"#;

#[guest_test(needs(Net, ErrorInjection))]
fn two_cards_share_an_intx_line_with_and_without_iommu() {
    let card = required(SITE.net.as_ref(), "a network card (CAROM_NET)");
    let other = required(SITE.aer.as_ref(), "another network card (CAROM_AER)");
    let job = TWO_CARDS.replace("MIB", &TRAFFIC_MIB.to_string());

    let guest = Guest::new("intx-shared").iommu_device(card).device(other);
    let outcome = run(&guest.cmdline("iommu.strict=1 e1000e.IntMode=0,0").job(&job));

    assert!(outcome.console.contains("CAROM-SAME"), "console:\n{}", outcome.console);
    assert_eq!(outcome.values("CAROM-LINK").collect::<Vec<_>>(), ["1", "2", "3"]);
    // Line of /proc/interrupts for the shared IRQ, for example `29: 1234 IO-APIC 22-fasteoi eth0, eth1`.
    let line: Vec<&str> = outcome.value("CAROM-LINE").unwrap().split_whitespace().collect();
    assert_eq!(line[2..4], ["IO-APIC", "22-fasteoi"], "{line:?}");
    let interrupts: u64 = line[1].parse().unwrap();
    assert!(interrupts > 20, "{interrupts} interrupts; console:\n{}", outcome.console);
    println!("intx-shared: {interrupts} interrupts, {TRAFFIC_MIB} MiB");
}

#[guest_test(slow = "two_cards_share_an_intx_line_with_and_without_iommu covers INTx, and unit tests cover the reset")]
fn drive_of_a_guest_without_msi_works_after_reboots() {
    let job = three_boots("touch /reboot-requested");

    let outcome = run(&Guest::new("intx-reboot").device(&SITE.nvme[0]).cmdline("pci=nomsi").job(&job));

    let boots: Vec<&str> = outcome.console.lines().filter_map(|line| line.strip_prefix("CAROM-BOOT ")).collect();
    assert_eq!(boots.len(), 3, "console:\n{}", outcome.console);
    assert_eq!(boots[1..], ["1", "2"], "console:\n{}", outcome.console);
    workload::check_verified(&outcome, 3).unwrap_or_else(|error| panic!("{error:#}"));
}

#[guest_test(
    slow = "two_cards_share_an_intx_line_with_and_without_iommu covers INTx, and hotplug:: covers the hotplug"
)]
fn drive_of_a_guest_without_msi_is_hotplugged_repeatedly() {
    let job = format!(
        "(while sleep 0.5; do grep -s nvme /proc/interrupts | sed 's/^ */CAROM-LINE /'; done) &\n{}",
        use_whenever_there("nvme0")
    );
    let vmm = ApiVmm::start(&SITE, &job).unwrap();
    create_and_boot(&vmm, json!({"payload": payload(&vmm, " pci=nomsi")}));
    vmm.wait_for("CAROM-READY", 1, BOOT_TIME).unwrap();

    for round in 1..=2 {
        let device = json!({"path": Site::sysfs(&SITE.nvme[0]), "id": "drive"});
        assert_eq!(vmm.call("PUT", "/api/v1/vm.add-device", Some(&device)).unwrap().0, 200);
        vmm.wait_for(&format!("CAROM-WORKED {round}\n"), 1, BOOT_TIME).unwrap();
        // A guest that is paused with a pending interrupt must continue.
        for _ in 0..3 {
            put(&vmm, "vm.pause", &Value::Null);
            put(&vmm, "vm.resume", &Value::Null);
        }
        put(&vmm, "vm.remove-device", &json!({"id": "drive"}));
        vmm.wait_for(&format!("CAROM-GONE {round}\n"), 1, BOOT_TIME).unwrap();
        wait_gone(&vmm, "drive");
    }

    let console = vmm.console();
    let on_its_line = |line: &str| line.starts_with("CAROM-LINE") && line.contains("IO-APIC  22-fasteoi");
    assert!(console.lines().any(on_its_line), "{console}");
    put(&vmm, "vm.shutdown", &Value::Null);
}

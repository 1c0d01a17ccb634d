// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Watchdog with Debian's driver. The guest continues while it reloads the watchdog, and is reset when it stops reloading.

use std::time::Duration;

use carom_integration::Kernel;
use carom_integration::api::ApiVmm;
use carom_integration::harness::guest_test;
use serde_json::json;

use crate::api::BOOT_TIME;
use crate::hotplug::{create_and_boot, end, info};
use crate::support::{MIB, SITE};

/// Job that reloads the watchdog for longer than its timeout, and then stops reloading it. If the watchdog caused this boot,
/// the job reports this and ends.
const JOB: &str = "
WATCHDOG=/sys/class/watchdog/watchdog0
STATUS=$(cat $WATCHDOG/bootstatus)
echo \"CAROM-BOOTED $STATUS $(cat $WATCHDOG/identity)\"
[ $STATUS = 0 ] || exit 0
rmmod i6300esb
insmod /modules/i6300esb.ko heartbeat=10
echo \"CAROM-TIMEOUT $(cat $WATCHDOG/timeout)\"
exec 3>/dev/watchdog0
for i in $(seq 13); do
    sleep 1
    echo reload >&3
done
echo CAROM-STOPS
sleep 120
echo CAROM-STILL-HERE
";

#[guest_test(slow = "unit tests cover the device, and lifecycle:: covers resets; this test waits for half a minute")]
fn guest_that_stops_reloading_its_watchdog_is_reset() {
    let mut vmm = ApiVmm::start_with(&SITE, Kernel::Stock, JOB).unwrap();
    create_and_boot(&vmm, json!({"memory": {"size": 1024 * MIB}, "watchdog": true}));
    assert_eq!(info(&vmm)["device_tree"]["_watchdog"]["pci_bdf"], "0000:00:1f.0");

    vmm.wait_for("CAROM-STOPS\n", 1, BOOT_TIME).unwrap();
    let expired = |vmm: &ApiVmm| {
        let events = vmm.events().unwrap();
        events.iter().filter(|event| (event.source.as_str(), event.event.as_str()) == ("watchdog", "expired")).count()
    };
    assert_eq!(expired(&vmm), 0, "the watchdog expired although it was reloaded in time: {}", vmm.console());
    vmm.wait_for("CAROM-JOB-EXIT 0\n", 1, BOOT_TIME + Duration::from_secs(10)).unwrap();

    let console = vmm.console();
    assert!(console.contains("CAROM-BOOTED 0 i6300ESB timer\n") && console.contains("CAROM-TIMEOUT 10\n"), "{console}");
    // 32 is WDIOF_CARDRESET: the watchdog caused this boot.
    assert!(console.contains("CAROM-BOOTED 32 i6300ESB timer\n"), "{console}");
    assert!(!console.contains("CAROM-STILL-HERE"), "{console}");
    assert_eq!(expired(&vmm), 1);
    let names: Vec<String> = vmm.events().unwrap().into_iter().map(|event| event.event).collect();
    let at =
        |name: &str| names.iter().position(|known| known == name).unwrap_or_else(|| panic!("no {name}: {names:?}"));
    assert!(at("expired") < at("rebooting") && at("rebooting") < at("rebooted"), "{names:?}");
    end(&mut vmm);
}

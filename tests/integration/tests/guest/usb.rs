// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A host controller with many small rings and buffers: xHCI, passed through, with a drive on it. Its driver has not opted in to
//! bouncing.

use carom_integration::harness::guest_test;
use carom_integration::workload::{self, fio_verify_on};
use carom_integration::{Guest, Outcome};

use crate::support::{SITE, number, required, run};

/// MiB that are written and verified.
const TRAFFIC_MIB: u32 = 4;

/// Waits for the drive, and sets the controller's switch to `CHOICE` before anything is read or written here.
const WAIT_FOR_DRIVE: &str = r#"
i=0
while [ ! -b /dev/sda ] && [ $i -lt 200 ]; do i=$((i + 1)); sleep 0.1; done
CONTROLLER=$(basename "$(readlink -f /sys/block/sda | sed 's,/usb[0-9].*,,')")
echo CHOICE >"/sys/bus/pci/devices/$CONTROLLER/iommu_bounce" || exit 94
start=$(cut -d' ' -f1 /proc/uptime)
"#;

const STATISTICS: &str = r#"
echo "CAROM-SECONDS $(awk -v start="$start" '{ print $1 - start }' /proc/uptime)"
sed 's/^/CAROM-STAT-/' $(grep -lx "device $CONTROLLER" /sys/kernel/debug/iommu_bounce/*/stats)
"#;

fn verified(name: &str, choice: &str) -> Outcome {
    let controller = required(SITE.usb.as_ref(), "an xHCI host controller (CAROM_USB)");
    let job = format!(
        "{}{}{STATISTICS}",
        WAIT_FOR_DRIVE.replace("CHOICE", choice),
        fio_verify_on("/dev/sda", TRAFFIC_MIB, 4)
    );

    let outcome =
        run(&Guest::new(name).iommu_device(controller).bounce("size=32M").cmdline("iommu.strict=1").job(&job));

    workload::check_verified(&outcome, 1).unwrap_or_else(|error| panic!("{error:#}"));
    let bounced = number(&outcome, "CAROM-STAT-bounced_pages") + number(&outcome, "CAROM-STAT-bounced_lists");
    let maps = outcome.counters.last().expect("counters at the end").requests.map;
    println!("{name}: {} s, {bounced} bounced, {maps} mapped", outcome.value("CAROM-SECONDS").unwrap());
    outcome
}

#[guest_test(needs(Usb), slow = "every_byte_of_a_bounced_usb_drive_is_right has the harder traffic")]
fn usb_drive_is_left_alone_by_default() {
    let outcome = verified("usb-auto", "auto");

    assert_eq!(number(&outcome, "CAROM-STAT-bounced_pages") + number(&outcome, "CAROM-STAT-bounced_lists"), 0);
    assert_eq!(number(&outcome, "CAROM-STAT-chunk_adds"), 0);
}

#[guest_test(needs(Usb), slow = "network:: has another device whose driver has not opted in")]
fn every_byte_of_a_bounced_usb_drive_is_right() {
    let outcome = verified("usb-on", "on");

    // Commands, statuses and data are a mapping each.
    let bounced = number(&outcome, "CAROM-STAT-bounced_pages") + number(&outcome, "CAROM-STAT-bounced_lists");
    assert!(bounced > 200, "{bounced} bounced; console:\n{}", outcome.console);
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The edu device in a guest: either QEMU's device, passed through, or the device of `edu-server`. This module contains parts
//! of jobs that find the device and bind it to a driver. Other parts run the guest's program edu-dma, which controls the
//! device's transfers.
//!
//! The guest's kernel does not use the RAM at [`VICTIM`], so no driver maps this RAM.

use std::fs;

use carom_integration::{Guest, Outcome};

use super::SITE;

/// Guest-physical address of the attacked RAM.
const VICTIM: u64 = 0x1000_0000;

/// Length of a transfer in bytes: half a page.
pub(crate) const TRANSFER: &str = "2048";

/// Shell lines that find one or two edu devices in the guest.
pub(crate) const FIND_EDU: &str = r#"
EDU=
for device in /sys/bus/pci/devices/*; do
    [ "$(cat "$device/vendor")$(cat "$device/device")" != 0x12340x11e8 ] || EDU="$EDU${EDU:+ }$(basename "$device")"
done
[ -n "$EDU" ] || exit 83
"#;

/// Shell lines that bind the edu devices to VFIO in the guest. VFIO puts them into one new domain.
pub(crate) const TAKE_EDU: &str = r#"
echo 1 >/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts
for device in $EDU; do
    echo vfio-pci >"/sys/bus/pci/devices/$device/driver_override"
    echo "$device" >/sys/bus/pci/drivers_probe
done
"#;

/// Shell lines that bind the only edu device to the patch's test driver, which tests the device when the driver is bound.
pub(crate) const TEST_EDU: &str = r#"
echo dma-bounce-test >"/sys/bus/pci/devices/$EDU/driver_override"
echo "$EDU" >/sys/bus/pci/drivers_probe
[ -e "/sys/bus/pci/devices/$EDU/driver" ] || { dmesg | tail -n 20; exit 84; }
"#;

/// Commands of edu-dma for a control experiment: without protection, this attack on [`VICTIM`] succeeds. So if such an attack
/// fails in another test, the protection works.
pub(crate) const ATTACK_ON_VICTIM: [&str; 5] =
    ["victim VICTIM 0xa5", "load victim", "victim VICTIM 0x11", "store victim", "victim-count 0xa5"];

/// Commands of edu-dma for accesses to mapped and unmapped memory. [`assert_reaches_mapped`] checks the results.
pub(crate) const REACH_MAPPED: [&str; 19] = [
    // The device can read and write mapped memory.
    "map 0x100000 rw",
    "fill 0x100000 0x5a",
    "load 0x100000",
    "fill 0x100000 0x11",
    "store 0x100000",
    "count 0x100000 0x5a",
    // The device can read a page that is mapped read-only, but cannot change it.
    "map 0x200000 r",
    "fill 0x200000 0x77",
    "store 0x200000",
    "count 0x200000 0x77",
    "load 0x200000",
    "store 0x100000",
    "count 0x100000 0x77",
    // The device can neither write nor read unmapped RAM.
    "victim VICTIM 0xa5",
    "store victim",
    "victim-count 0xa5",
    "load victim",
    "store 0x100000",
    "count 0x100000 0xa5",
];

/// Commands to run after [`REACH_MAPPED`]. They unmap a page, and try to transfer the page's bytes to the device.
/// [`assert_reaches_mapped`] checks that the transfer fails.
pub(crate) const REACH_UNMAPPED: [&str; 8] = [
    "fill 0x100000 0x33",
    "unmap 0x100000",
    "load 0x100000",
    "map 0x400000 rw",
    "fill 0x400000 0x44",
    "store 0x400000",
    "count 0x400000 0x33",
    "count 0x400000 0x44",
];

/// Checks that the device could only access mapped memory, with the permissions of its mapping.
pub(crate) fn assert_reaches_mapped(outcome: &Outcome) {
    assert_result(outcome, "map 0x100000 rw", &["ok"]);
    assert_result(outcome, "map 0x200000 r", &["ok"]);
    assert_result(outcome, "count 0x100000 0x5a", &[TRANSFER]);
    assert_result(outcome, "count 0x200000 0x77", &[TRANSFER]);
    assert_result(outcome, "count 0x100000 0x77", &[TRANSFER]);
    assert_result(outcome, "victim-count 0xa5", &[TRANSFER]);
    assert_result(outcome, "count 0x100000 0xa5", &["0"]);
    assert_result(outcome, "unmap 0x100000", &["ok"]);
    assert_result(outcome, "count 0x400000 0x33", &["0"]);
    // The store after the failed load was executed: it replaced all bytes 0x44 with the contents of the device's buffer.
    assert_result(outcome, "count 0x400000 0x44", &["0"]);
}

/// Returns a guest with edu-dma.
pub(crate) fn guest(name: &str, job: &str) -> Guest {
    let program = fs::read(SITE.edu_dma.as_ref().expect("CAROM_EDU_DMA is set")).expect("CAROM_EDU_DMA can be read");
    Guest::new(name).cmdline(&format!("iommu.strict=1 memmap=64K${VICTIM:#x}")).program("edu-dma", program).job(job)
}

/// Returns a part of a job that runs edu-dma with `commands`, one per line.
pub(crate) fn steer(mode: &str, commands: &[&str]) -> String {
    let lines: String =
        commands.iter().map(|command| format!("{}\n", command.replace("VICTIM", &format!("{VICTIM:#x}")))).collect();
    format!("edu-dma {mode} $EDU <<'END' || exit 85\n{lines}END\n")
}

/// Checks the results of a command of edu-dma, in order.
pub(crate) fn assert_result(outcome: &Outcome, command: &str, wanted: &[&str]) {
    let lines = outcome.values("CAROM-EDU");
    let results: Vec<&str> = lines.filter_map(|line| line.strip_prefix(command)?.strip_prefix(' ')).collect();
    assert_eq!(results, wanted, "{command}; console:\n{}", outcome.console);
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Firmware: EDK2 finds Debian's boot loader on a disk, and the loader boots Debian. Each test takes minutes in an emulated
//! machine.

use std::time::Duration;

use carom_integration::harness::guest_test;

use crate::support::debian::{COMMAND_TIME, Debian};

/// Checks the output of the firmware and of the boot loader.
fn loads(debian: &mut Debian) {
    debian.wait_for("BdsDxe: starting Boot", Duration::from_secs(180));
    debian.wait_for("GRUB", COMMAND_TIME);
}

#[guest_test(needs(Firmware), slow = "five minutes; unit tests cover the firmware's requirements")]
fn disk_boots_by_its_own_loader_and_again_after_a_reboot() {
    let platform = ["--platform", "system_serial_number=VM-17", "--cpus", "boot=2"];
    let mut debian = Debian::start_by_firmware("", &platform);
    loads(&mut debian);
    debian.log_in();
    assert_eq!(debian.run("test -d /sys/firmware/efi && cat /sys/class/dmi/id/product_serial && nproc"), "VM-17\n2\n");
    assert_eq!(debian.run("systemctl --failed --plain --no-legend"), "");
    debian.leave("systemctl reboot");
    loads(&mut debian);
    debian.log_in();
    debian.power_off();
}

#[guest_test(
    needs(Firmware),
    slow = "four minutes; disk_boots_by_its_own_loader_and_again_after_a_reboot covers the guest without IOMMU"
)]
fn disk_behind_the_iommu_boots_by_its_own_loader() {
    let mut debian = Debian::start_by_firmware(",iommu=on", &["--rng", "src=/dev/urandom,iommu=on"]);
    loads(&mut debian);
    debian.log_in();
    let groups =
        debian.run("ls -d /sys/kernel/iommu_groups/*/devices/* | wc -l; cat /sys/kernel/iommu_groups/*/type | sort -u");
    assert_eq!(groups, "2\nDMA\n");
    debian.power_off();
}

#[guest_test(needs(Firmware), slow = "three minutes; snapshot:: covers guests without firmware")]
fn guest_booted_by_firmware_continues_in_another_process() {
    let mut debian = Debian::start_by_firmware("", &["--cpus", "boot=2"]);
    loads(&mut debian);
    debian.log_in();
    debian.run("echo kept >/run/kept");
    debian.go_on_in_another_process();
    assert_eq!(debian.run("cat /run/kept; nproc"), "kept\n2\n");
    debian.run("head -c 1048576 /dev/urandom >/root/written && sync");
    debian.power_off();
}

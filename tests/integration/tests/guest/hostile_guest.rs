// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Malicious guest with devices of the host behind the virtio-iommu. Runs the test program of `vmm` with such a guest. The
//! program checks after each reset that only parked chunks are pinned. The guest has two drives and no edu device, because the
//! edu device's copies outside of its buffer crash the emulated machine.

use std::process::Command;

use carom_integration::harness::{guest_test, tell};
use carom_integration::host_memory::DmaMemory;

use crate::support::SITE;

/// Runs guests with these seeds for `seconds` seconds each.
fn attack(seeds: &str, seconds: u32) {
    let before = DmaMemory::now().unwrap();
    let program = SITE.hostile_guest.as_ref().expect("the test of a hostile guest (CAROM_HOSTILE_GUEST)");
    let output = Command::new(program)
        .arg("--nocapture")
        .env("CAROM_BIN", &SITE.carom)
        .env("CAROM_HOSTILE_DEVICES", SITE.nvme.join(","))
        .env("CAROM_HOSTILE_SEEDS", seeds)
        .env("CAROM_HOSTILE_SECONDS", seconds.to_string())
        .output()
        .unwrap();
    let (out, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let reported: Vec<&str> = said.lines().filter(|line| line.starts_with("seed ")).collect();
    for line in &reported {
        tell(line);
    }
    assert!(output.status.success(), "{out}{said}");
    assert_eq!(reported.len(), seeds.split(',').count(), "{out}{said}");
    before.wait_until_back().unwrap();
}

#[guest_test(needs(SecondDrive))]
fn reset_hostile_guest_pins_only_parked_chunks() {
    attack("1", 30);
}

#[guest_test(needs(SecondDrive), slow = "a longer run of reset_hostile_guest_pins_only_parked_chunks", by_iommufd)]
fn reset_hostile_guest_pins_only_parked_chunks_for_a_minute() {
    attack("2,3", 60);
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Memory that a device behind the IOMMU can access. QEMU's edu device is passed through, and does DMA to addresses that the
//! tests select. In some tests, an NVMe drive has windows.

use carom_integration::harness::guest_test;
use std::process::Command;
use std::thread;
use std::time::Duration;

use carom_integration::workload::{self, WAIT_FOR_NVME};

use crate::support::edu::{self, FIND_EDU, TAKE_EDU, TRANSFER, assert_result, guest, steer};
use crate::support::{SITE, number, required, run};

fn edu() -> &'static str {
    required(SITE.edu.as_ref(), "QEMU's edu device (CAROM_EDU)")
}

/// The kernel logs at most 10 messages about DMA faults in this interval. Each fault causes two messages. The kernel drops
/// further messages (`dmar_fault()` in `drivers/iommu/intel/dmar.c`, `DEFAULT_RATELIMIT_INTERVAL`).
const FAULTS_RATE_LIMIT: Duration = Duration::from_secs(5);

/// Waits for [`FAULTS_RATE_LIMIT`], and returns the number of DMA faults that this host has logged for the device. Without the
/// wait, the previous test's faults may have used up the kernel's limit, because a guest on a fast machine boots within this
/// interval.
fn host_faults_before(address: &str) -> usize {
    thread::sleep(FAULTS_RATE_LIMIT + Duration::from_millis(500));
    host_faults(address)
}

/// Returns the number of DMA faults that this host has logged for the device.
fn host_faults(address: &str) -> usize {
    let log = Command::new("dmesg").output().expect("dmesg runs");
    let short = address.trim_start_matches("0000:");
    String::from_utf8_lossy(&log.stdout)
        .lines()
        .filter(|line| line.contains("fault addr") && line.contains(short))
        .count()
}

#[guest_test(needs(Edu))]
fn device_without_iommu_reaches_ram() {
    let job = format!("{FIND_EDU}{}", steer("raw", &edu::ATTACK_ON_VICTIM));

    let outcome = run(&guest("edu-control", &job).device(edu()));

    assert_result(&outcome, "victim-count 0xa5", &[TRANSFER]);
}

#[guest_test(needs(Edu))]
fn device_in_no_domain_reaches_nothing() {
    let commands = ["victim VICTIM 0xa5", "store victim", "store 0x0", "store 0x100000", "victim-count 0xa5"];
    let job = format!("{FIND_EDU}{}", steer("raw", &commands));
    let before = host_faults_before(edu());

    let outcome = run(&guest("edu-no-domain", &job).iommu_device(edu()));

    assert_result(&outcome, "store victim", &["done"]);
    assert_result(&outcome, "victim-count 0xa5", &[TRANSFER]);
    assert!(host_faults(edu()) > before, "the host logged no DMA fault of the attempt");
    assert_eq!(outcome.peak_pinned_bytes, 0, "memory was pinned for the device");
}

#[guest_test(needs(Edu))]
fn device_accesses_only_mapped_memory_as_permitted() {
    let nothing_there = ["store 0x300000", "load 0x300000"];
    let commands = [&edu::REACH_MAPPED[..], &nothing_there, &edu::REACH_UNMAPPED].concat();
    let job = format!("{FIND_EDU}{TAKE_EDU}{}", steer("vfio", &commands));
    let before = host_faults_before(edu());

    let outcome = run(&guest("edu-own-domain", &job).iommu_device(edu()));

    edu::assert_reaches_mapped(&outcome);
    assert!(host_faults(edu()) > before, "the host logged no DMA fault of the attempts");
}

#[guest_test(needs(Edu, Edu2))]
fn two_devices_of_a_domain_access_only_its_mappings() {
    let commands = [
        "map 0x100000 rw",
        "fill 0x100000 0x5a",
        "load 0x100000",
        "use 1",
        "load 0x100000",
        "map 0x200000 rw",
        "store 0x200000",
        "count 0x200000 0x5a",
        // The second device has just stored bytes in this page. Now the first device loads bytes that the guest has written to
        // the same page.
        "fill 0x200000 0x66",
        "use 0",
        "load 0x200000",
        "unmap 0x200000",
        "store 0x100000",
        "count 0x100000 0x66",
        "victim VICTIM 0xa5",
        "store victim",
        "use 1",
        "store victim",
        "load 0x200000",
        "victim-count 0xa5",
    ];
    let job = format!("{FIND_EDU}{TAKE_EDU}{}", steer("vfio", &commands));
    let second = required(SITE.edu2.as_ref(), "a second edu device (CAROM_EDU2)");
    let (before, before_second) = (host_faults_before(edu()), host_faults(second));

    let outcome = run(&guest("edu-two", &job).iommu_device(edu()).iommu_device(second));

    assert_result(&outcome, "use 1", &["ok", "ok"]);
    assert_result(&outcome, "count 0x200000 0x5a", &[TRANSFER]);
    assert_result(&outcome, "count 0x100000 0x66", &[TRANSFER]);
    assert_result(&outcome, "victim-count 0xa5", &[TRANSFER]);
    assert!(
        host_faults(edu()) > before && host_faults(second) > before_second,
        "the host did not log DMA faults of both devices"
    );
    let host = outcome.counters.last().expect("the VMM reports its counters at the end");
    let served = host.requests.minus(host.failed).map;
    assert!(served >= 2, "{host:?}");
    if SITE.iommufd {
        assert_eq!(host.host_maps, served, "the VMM did not map each mapping by one call for both devices: {host:?}");
    } else {
        assert!(host.host_maps > served, "the VMM did not map each mapping by one call per device: {host:?}");
    }
}

/// Shell function `attack COMMAND [AFTER]`: prints commands for edu-dma. They try COMMAND on four pages of each chunk in the
/// NVMe drive's domain. The commands in AFTER follow each attempt.
const ATTACK: &str = r#"
START=$(sed -n 's/^iova_start //p' /sys/kernel/debug/iommu_bounce/*/stats | head -n 1)
CHUNK=$(sed -n 's/^chunk_size //p' /sys/kernel/debug/iommu_bounce/*/stats | head -n 1)
CHUNKS=$(sed -n 's/^chunks //p' /sys/kernel/debug/iommu_bounce/*/stats | head -n 1)
echo "CAROM-CHUNKS $CHUNKS"
attack() {
    chunk=0
    while [ $chunk -lt "$CHUNKS" ]; do
        for offset in 0 4096 65536 1048576; do
            printf '%s 0x%x\n%s\n' "$1" $((START + chunk * CHUNK + offset)) "$2"
        done
        chunk=$((chunk + 1))
    done
}
"#;

#[guest_test(needs(Edu), by_iommufd)]
fn device_does_not_reach_chunks_of_another_domain() {
    // The job fills the drive with 0xc3 and reads it through its window, so that slots contain these bytes. The edu device is
    // in its own domain. It first tries to read the slots. Then it tries to overwrite the slots while the drive's I/O is
    // verified.
    let verify = workload::fio_verify(12, 64);
    let job = format!(
        r#"{WAIT_FOR_NVME}{FIND_EDU}
tr '\000' '\303' </dev/zero | head -c 16777216 | dd of=/dev/nvme0n1 bs=128k conv=fsync 2>/dev/null
fio --name=fill --filename=/dev/nvme0n1 --direct=1 --rw=read --ioengine=libaio --iodepth=64 --bs=128k --size=16M >/dev/null || exit 84
{TAKE_EDU}{ATTACK}
{{
    echo 'map 0x100000 rw'
    echo 'fill 0x100000 0xee'
    attack load 'store 0x100000
count 0x100000 0xc3'
}} >/tmp/commands
edu-dma vfio $EDU </tmp/commands >/tmp/loads || exit 85
echo "CAROM-LOADS $(grep -c '^CAROM-EDU load .* done$' /tmp/loads)"
echo "CAROM-LOOKS $(grep -c '^CAROM-EDU count 0x100000 0xc3 ' /tmp/loads)"
echo "CAROM-LEAKS $(grep '^CAROM-EDU count 0x100000 0xc3 ' /tmp/loads | grep -vc ' 0$')"
{{
    echo 'map 0x100000 rw'
    echo 'fill 0x100000 0x5a'
    echo 'load 0x100000'
    attack store ''
}} >/tmp/commands
edu-dma vfio $EDU </tmp/commands >/tmp/stores &
{verify}
wait $! || exit 86
echo "CAROM-STORES $(grep -c '^CAROM-EDU store .* done$' /tmp/stores)"
{verify}
"#
    );
    let before = host_faults_before(edu());

    let guest = guest("edu-chunks", &job).iommu_device(&SITE.nvme[0]).iommu_device(edu()).bounce("size=64M");
    let outcome = run(&guest);

    let chunks = number(&outcome, "CAROM-CHUNKS");
    assert!(chunks > 0, "the drive's domain has no chunks");
    assert_eq!(number(&outcome, "CAROM-LOADS"), chunks * 4, "not every load was tried");
    assert_eq!(number(&outcome, "CAROM-LOOKS"), chunks * 4, "not every loaded buffer was checked");
    assert_eq!(number(&outcome, "CAROM-STORES"), chunks * 4, "not every store was tried");
    assert_eq!(number(&outcome, "CAROM-LEAKS"), 0, "the edu device read bytes of the drive's chunks");
    workload::check_verified(&outcome, 2).unwrap_or_else(|error| panic!("{error:#}"));
    assert!(host_faults(edu()) > before, "the host logged no DMA fault of the attempts");
}

#[guest_test(needs(Edu))]
fn aperture_of_windows_is_reserved_for_every_endpoint() {
    let job = format!(
        r#"{WAIT_FOR_NVME}{FIND_EDU}{TAKE_EDU}
START=$(sed -n 's/^iova_start //p' /sys/kernel/debug/iommu_bounce/*/stats | head -n 1)
echo "CAROM-START $START"
sed 's/^/CAROM-RESERVED /' "/sys/bus/pci/devices/$EDU/iommu_group/reserved_regions"
printf 'map %s rw\n' "$START" | edu-dma vfio $EDU | sed 's/^CAROM-EDU map 0x[0-9a-f]* rw/CAROM-APERTURE/'
"#
    );

    let guest = guest("edu-aperture", &job).iommu_device(&SITE.nvme[0]).iommu_device(edu()).bounce("size=64M");
    let outcome = run(&guest);

    let start = number(&outcome, "CAROM-START");
    let hex = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).unwrap_or(0);
    let reserved = outcome.values("CAROM-RESERVED").any(|line| {
        let words: Vec<&str> = line.split(' ').collect();
        words.len() == 3 && hex(words[0]) <= start && start <= hex(words[1]) && words[2] == "reserved"
    });
    assert!(reserved, "the aperture at {start:#x} is not a reserved region; console:\n{}", outcome.console);
    assert_ne!(outcome.value("CAROM-APERTURE").unwrap_or("ok"), "ok", "console:\n{}", outcome.console);
}

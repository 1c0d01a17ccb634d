// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The guest patch itself: its KUnit tests, its test driver on the edu device, bouncing through guest pages, and the return of
//! idle memory.

use carom_integration::harness::guest_test;
use std::time::Duration;

use carom_integration::workload::{self, WAIT_FOR_NVME};
use carom_integration::{Guest, Kernel, Vmm, kunit};

use crate::support::edu::{FIND_EDU, TEST_EDU};
use crate::support::{
    COMPLAINTS, MIB, REBIND_UNDER_LOAD, SITE, assert_no_complaint, guest_with_windows, number, required, run,
};

/// Runs the patch's KUnit tests at boot, without devices, and checks the result of each test. The guest has two NUMA nodes, so no
/// test is skipped.
fn kunit_is_run(name: &str, kernel: Kernel) {
    let job = format!("{}{COMPLAINTS}", kunit::JOB);

    let guest = Guest::new(name).kernel(kernel).cmdline("log_buf_len=1M").job(&job);
    let outcome = run(&kunit::on_two_nodes(guest, 256));

    kunit::check(&outcome, &SITE, kernel, &[]).unwrap_or_else(|error| panic!("{error:#}"));
    assert_no_complaint(&outcome);
}

#[guest_test]
fn kunit_passes() {
    kunit_is_run("patch-kunit", Kernel::Patched);
}

#[guest_test]
fn kunit_passes_on_the_newer_kernel() {
    kunit_is_run("patch-kunit-newer", Kernel::Newer);
}

/// Shell lines that fill the drive with the word that the test driver's attack searches for, and then read the drive so that
/// slots contain the word.
const DRIVE_WORKS: &str = r#"
yes CaromSec | tr -d '\n' | head -c 8388608 | dd of=/dev/nvme0n1 bs=128k conv=fsync 2>/dev/null
fio --name=fill --filename=/dev/nvme0n1 --direct=1 --rw=read --ioengine=libaio --iodepth=64 --bs=128k --size=8M >/dev/null || exit 85
"#;

/// Runs the patch's test driver on the edu device. The driver checks every byte of the device's DMA, and makes the device
/// access forbidden addresses. Meanwhile, a drive of the same guest does bounced I/O.
fn edu_is_right(name: &str, kernel: Kernel) {
    let edu = required(SITE.edu.as_ref(), "QEMU's edu device (CAROM_EDU)");
    let verify = workload::fio_verify(8, 16).replace("--size=", "--offset=16M --size=");
    let job = format!(
        r#"{WAIT_FOR_NVME}{DRIVE_WORKS}
(
    {verify}
) &{FIND_EDU}{TEST_EDU}dmesg | sed -n 's/^.*dma-bounce-test: all \([0-9]*\) cases passed/CAROM-CASES \1/p'
wait
{COMPLAINTS}"#
    );

    // The budget is larger than the memory that the drive can use, so that the edu device always gets the memory that its test
    // needs.
    let guest = Guest::new(name).kernel(kernel).iommu_device(edu).iommu_device(&SITE.nvme[0]).bounce("size=128M");
    let outcome = run(&guest.time_limit(Duration::from_secs(150)).job(&job));

    assert!(number(&outcome, "CAROM-CASES") >= 12);
    workload::check_verified(&outcome, 1).unwrap_or_else(|error| panic!("{error:#}"));
    assert_no_complaint(&outcome);
}

#[guest_test(needs(EduNarrow))]
fn device_that_cannot_address_the_windows_is_mapped() {
    let edu = required(SITE.edu_narrow.as_ref(), "an edu device with 28 address bits (CAROM_EDU_NARROW)");
    let job = format!(
        r#"{FIND_EDU}{TEST_EDU}dmesg | sed -n 's/^.*dma-bounce-test: all \([0-9]*\) narrow cases passed/CAROM-CASES \1/p'
sed 's/^/CAROM-STAT-/' /sys/kernel/debug/iommu_bounce/*/stats
{COMPLAINTS}"#
    );

    let outcome = run(&Guest::new("patch-narrow")
        .cmdline("iommu.strict=1 dma_bounce_test.mask_bits=28")
        .iommu_device(edu)
        .bounce("size=32M")
        .job(&job));

    assert_eq!(number(&outcome, "CAROM-CASES"), 6);
    assert!(number(&outcome, "CAROM-STAT-fallback_mask") > 0, "console:\n{}", outcome.console);
    assert_eq!(number(&outcome, "CAROM-STAT-bounced_pages"), 0, "console:\n{}", outcome.console);
    assert_no_complaint(&outcome);
}

#[guest_test(needs(Edu))]
fn every_byte_of_a_real_device_is_right() {
    edu_is_right("patch-edu", Kernel::Patched);
}

#[guest_test(
    needs(Edu),
    slow = "kunit_passes_* and io_is_verified_and_bounced_* cover this kernel, and the same test covers the older kernel"
)]
fn every_byte_of_a_real_device_is_right_on_the_newer_kernel() {
    edu_is_right("patch-edu-newer", Kernel::Newer);
}

#[guest_test]
fn io_is_verified_and_bounced_on_the_newer_kernel() {
    // Without huge pages, a large request consists of several physical ranges.
    let job = format!(
        "{WAIT_FOR_NVME}echo never >/sys/kernel/mm/transparent_hugepage/enabled\n{}sed 's/^/CAROM-STAT-/' /sys/kernel/debug/iommu_bounce/*/stats\n{COMPLAINTS}",
        workload::fio_verify(16, 64)
    );
    let guest = guest_with_windows("patch-newer").kernel(Kernel::Newer).job(&job);

    let outcome = run(&guest);

    workload::check_verified(&outcome, 1).unwrap_or_else(|error| panic!("{error:#}"));
    assert_eq!(outcome.value("CAROM-STAT-provider").unwrap_or_default(), "windows");
    // A request with several physical ranges counts as one bounced request, in one slot. A request with one range counts as
    // bounced pages.
    let [requests, pages] = ["requests", "pages"].map(|what| number(&outcome, &format!("CAROM-STAT-bounced_{what}")));
    assert!(
        requests > 50 && requests + pages > 500,
        "{requests} requests and {pages} pages bounced; console:\n{}",
        outcome.console
    );
    assert_no_complaint(&outcome);
}

#[guest_test]
fn windows_are_rejected_if_uncached() {
    // Without the page attribute table, the MTRRs silently make mappings of BARs uncached. So the guest must not use windows.
    let job = format!(
        "{WAIT_FOR_NVME}{}echo \"CAROM-POOLS $(ls /sys/kernel/debug/iommu_bounce 2>/dev/null | wc -l)\"\n{COMPLAINTS}",
        workload::fio_verify(2, 16)
    );

    let guest =
        Guest::new("patch-nopat").iommu_device(&SITE.nvme[0]).bounce("size=32M").cmdline("iommu.strict=1 nopat");
    let outcome = run(&guest.job(&job));

    workload::check_verified(&outcome, 1).unwrap_or_else(|error| panic!("{error:#}"));
    assert_eq!(number(&outcome, "CAROM-POOLS"), 0, "console:\n{}", outcome.console);
    let requests = &outcome.counters.last().expect("the VMM reports its counters at the end").requests;
    assert!(requests.window_add == 0 && requests.maps() > 0, "{requests:?}");
    assert_no_complaint(&outcome);
}

#[guest_test]
fn threshold_of_a_device_is_set_in_sysfs() {
    let read = "dd if=/dev/nvme0n1 of=/dev/null iflag=direct bs=64k count=32 2>/dev/null || exit 91\n";
    let job = format!(
        r#"{WAIT_FOR_NVME}THRESHOLD=/sys/bus/pci/devices/$NVME/iommu_bounce/threshold
WRITE=${{THRESHOLD}}_write
large() {{ sed -n 's/^fallback_size //p' /sys/kernel/debug/iommu_bounce/*/stats; }}
for wrong in -1 x 512K 4Kx ''; do
    for file in $THRESHOLD $WRITE; do
        if echo "$wrong" >$file; then echo "CAROM-TAKEN $wrong"; fi
    done
done 2>/dev/null
echo "CAROM-BEFORE $(cat $THRESHOLD)"
start=$(large)
{read}echo "CAROM-LARGE $(($(large) - start))"
sed -n 's/^threshold/CAROM-ADVICE/p' /sys/kernel/debug/iommu_bounce/*/stats
echo 16K >$THRESHOLD
echo "CAROM-SET $(cat $THRESHOLD)"
echo "CAROM-SET-WRITE $(cat $WRITE)"
start=$(large)
{read}echo "CAROM-LARGE-WHEN-SET $(($(large) - start))"
echo 64K >$WRITE
echo "CAROM-KEPT $(cat $THRESHOLD)"
start=$(large)
{read}echo "CAROM-LARGE-FOR-WRITES $(($(large) - start))"
"#
    );

    let guest = guest_with_windows("patch-sysfs").bounce("size=64M,threshold=32K,threshold_write=128K");
    let outcome = run(&guest.job(&job));

    assert_eq!(outcome.values("CAROM-TAKEN").collect::<Vec<_>>(), [""; 0]);
    assert_eq!([number(&outcome, "CAROM-BEFORE"), number(&outcome, "CAROM-SET")], [0, 16384]);
    assert_eq!(number(&outcome, "CAROM-LARGE"), 0, "console:\n{}", outcome.console);
    // The guest uses the host's advice, one threshold for each direction. A read of the drive writes memory.
    assert_eq!([number(&outcome, "CAROM-ADVICE"), number(&outcome, "CAROM-ADVICE_write")], [32 << 10, 128 << 10]);
    // A change of the first file applies to both directions.
    assert_eq!(number(&outcome, "CAROM-SET-WRITE"), 16384);
    assert!(number(&outcome, "CAROM-LARGE-WHEN-SET") >= 32, "console:\n{}", outcome.console);
    assert_eq!(number(&outcome, "CAROM-KEPT"), 16384);
    assert_eq!(number(&outcome, "CAROM-LARGE-FOR-WRITES"), 0, "console:\n{}", outcome.console);
}

/// Checks that the drive's DMA bounces through guest pages if the drive's IOMMU has no windows.
fn guest_pages_serve(name: &str, vmm: Vmm, cmdline: &str) {
    let job = format!(
        "{WAIT_FOR_NVME}{}sed 's/^/CAROM-STAT-/' $(grep -lx \"device $NVME\" /sys/kernel/debug/iommu_bounce/*/stats)\n\
         {COMPLAINTS}",
        workload::fio_verify(8, 64)
    );
    let guest = Guest::new(name)
        .vmm(vmm)
        .iommu_device(&SITE.nvme[0])
        .cmdline("iommu.strict=1 iommu.bounce=auto")
        .cmdline(cmdline)
        // QEMU's Intel IOMMU is slow in an emulated machine.
        .time_limit(Duration::from_secs(180))
        .job(&job);

    let outcome = run(&guest);

    workload::check_verified(&outcome, 1).unwrap_or_else(|error| panic!("{error:#}"));
    assert_eq!(outcome.value("CAROM-STAT-provider").unwrap_or_default(), "pages");
    let bounced = number(&outcome, "CAROM-STAT-bounced_pages") + number(&outcome, "CAROM-STAT-bounced_lists");
    assert!(bounced > 500, "bounced {bounced}; console:\n{}", outcome.console);
    // These IOMMUs advise no bounce threshold, so the guest must use the threshold that it has measured.
    for key in ["threshold", "threshold_write"] {
        let threshold = number(&outcome, &format!("CAROM-STAT-{key}"));
        assert!((4096..=262_144).contains(&threshold), "{key} {threshold}");
        assert_eq!(number(&outcome, &format!("CAROM-STAT-{key}_measured")), threshold, "{key}");
    }
    assert_no_complaint(&outcome);
}

#[guest_test(slow = "drive_with_metadata_is_verified covers guest pages")]
fn guest_pages_replace_missing_windows() {
    guest_pages_serve("patch-pages", Vmm::Qemu, "");
}

#[guest_test(slow = "drives_of_a_group_* cover guest pages with more drives")]
fn guest_pages_replace_windows_on_an_intel_iommu() {
    guest_pages_serve("patch-intel", Vmm::QemuIntel, "intel_iommu=on");
}

#[guest_test]
fn boot_option_limits_the_pages_of_a_domain() {
    let job = format!(
        "{WAIT_FOR_NVME}{}sed 's/^/CAROM-STAT-/' $(grep -lx \"device $NVME\" /sys/kernel/debug/iommu_bounce/*/stats)\n\
         {COMPLAINTS}",
        workload::fio_verify(8, 64)
    );
    // The kernel ignores excessive values such as 2 GiB. 3 MiB is not a multiple of the chunk size, so the kernel uses 4 MiB.
    let guest = Guest::new("patch-limit").vmm(Vmm::Qemu).iommu_device(&SITE.nvme[0]);
    let outcome = run(&guest.cmdline("iommu.strict=1 iommu.bounce=pages=2G,write=64K,auto,128K,pages=3M,x").job(&job));

    workload::check_verified(&outcome, 1).unwrap_or_else(|error| panic!("{error:#}"));
    let figure = |name| number(&outcome, &format!("CAROM-STAT-{name}"));
    assert_eq!(["budget", "iova_len", "peak_chunk_bytes"].map(figure), [4 * MIB; 3], "console:\n{}", outcome.console);
    assert_eq!(["threshold", "threshold_write"].map(figure), [128 << 10, 64 << 10]);
    let bounced = figure("bounced_pages") + figure("bounced_lists");
    assert!(figure("fallback_full") > 0 && bounced > 0, "console:\n{}", outcome.console);
    assert_no_complaint(&outcome);
}

/// Job for two drives of one IOMMU group. The job first verifies I/O on each drive alone. Then it repeats verified I/O on the
/// first drive. Meanwhile, it twice unbinds the second drive with I/O in flight, binds it again and verifies I/O on it.
const DRIVES_OF_A_GROUP_WORK: &str = r#"
# Waits for the drive of a PCI device, and prints its name, which may change.
drive_of() {
    i=0
    while ! basename /sys/bus/pci/devices/"$1"/nvme/nvme*/nvme*n1 | grep -v '\*'; do
        i=$((i + 1))
        [ $i -lt 300 ] || { dmesg | tail -n 30; break; }
        sleep 0.1
    done
}
echo never >/sys/kernel/mm/transparent_hugepage/enabled
for device in /sys/bus/pci/drivers/nvme/0*; do
    device=$(basename "$device")
    echo "CAROM-GROUP $(basename "$(readlink -f "/sys/bus/pci/devices/$device/iommu_group")")"
    FIRST=${FIRST:-$device} SECOND=$device
done
for device in /sys/bus/pci/devices/$FIRST/iommu_group/devices/*; do
    grep -lx "device $(basename "$device")" /sys/kernel/debug/iommu_bounce/*/stats
done >/tmp/pools
echo "CAROM-POOLS $(wc -l </tmp/pools)"
POOL=$(head -n 1 /tmp/pools)
bounced() { awk '/^bounced_/ { n += $2 } END { print n }' "$POOL"; }

START=$(bounced)
verify FIRST "$(drive_of "$FIRST")"
MIDDLE=$(bounced)
verify SECOND "$(drive_of "$SECOND")"
echo "CAROM-BOUNCED-FIRST $((MIDDLE - START))"
echo "CAROM-BOUNCED-SECOND $(($(bounced) - MIDDLE))"
while [ ! -e /tmp/enough ]; do verify FIRST "$(drive_of "$FIRST")"; done &
for round in 1 2; do
    rebind_under_load "$SECOND"
    verify SECOND "$(drive_of "$SECOND")"
done
touch /tmp/enough
wait
awk '/^slots_(read|write|rw)_/ { n += $2 } /^free_/ { n -= $2 } END { print "CAROM-MAPPED", n + 0 }' "$POOL"
"#;

/// Checks two drives that the IOMMU cannot distinguish. The drives share an IOMMU group, and therefore a domain and a pool.
fn drives_of_a_group_share_a_pool(name: &str, vmm: Vmm, cmdline: &str) {
    let images = [(); 2].map(|()| tempfile::NamedTempFile::new().unwrap());
    for image in &images {
        image.as_file().set_len(32 * MIB).unwrap();
    }
    let verify = workload::fio_verify(4, 16)
        .replace("/dev/nvme0n1", "/dev/$2")
        .replace("/tmp/verify", "/tmp/verify-$1")
        .replace("CAROM-VERIFY", "CAROM-VERIFY-$1");
    let job = format!("verify() {{\n{verify}}}\n{REBIND_UNDER_LOAD}{DRIVES_OF_A_GROUP_WORK}{COMPLAINTS}");
    let guest = images.iter().fold(Guest::new(name), |guest, image| guest.group_drive(image.path()));

    let outcome = run(&guest
        .vmm(vmm)
        .cmdline("iommu.strict=1 iommu.bounce=256K")
        .cmdline(cmdline)
        .time_limit(Duration::from_secs(150))
        .job(&job));

    let groups: Vec<&str> = outcome.values("CAROM-GROUP").collect();
    assert!(groups.len() == 2 && groups[0] == groups[1], "{groups:?}");
    assert_eq!(number(&outcome, "CAROM-POOLS"), 1, "console:\n{}", outcome.console);
    for key in ["CAROM-BOUNCED-FIRST", "CAROM-BOUNCED-SECOND"] {
        assert!(number(&outcome, key) > 100, "console:\n{}", outcome.console);
    }
    for (drive, least) in [("FIRST", 2), ("SECOND", 3)] {
        let key = format!("CAROM-VERIFY-{drive}");
        let passes: Vec<&str> = outcome.values(&key).collect();
        assert!(passes.len() >= least, "{drive}: {passes:?}; console:\n{}", outcome.console);
        let verified = |pass: &&str| pass.strip_prefix("0 ").is_some_and(|bytes| bytes != "0" && !bytes.is_empty());
        assert!(passes.iter().all(verified), "{drive}: {passes:?}; console:\n{}", outcome.console);
    }
    assert_eq!(number(&outcome, "CAROM-MAPPED"), 0, "console:\n{}", outcome.console);
    assert_no_complaint(&outcome);
}

#[guest_test(
    slow = "drive_with_metadata_is_verified covers guest pages on this IOMMU, and the test of the Intel IOMMU covers a group's pool"
)]
fn drives_of_a_group_share_a_pool_on_virtio_iommu() {
    drives_of_a_group_share_a_pool("patch-group", Vmm::Qemu, "");
}

#[guest_test]
fn drives_of_a_group_share_a_pool_on_an_intel_iommu() {
    drives_of_a_group_share_a_pool("patch-group-intel", Vmm::QemuIntel, "intel_iommu=on");
}

#[guest_test]
fn idle_memory_returns_to_the_host() {
    let job = format!(
        r#"{WAIT_FOR_NVME}
POOL=$(echo /sys/kernel/debug/iommu_bounce/domain*)
{verify}
sed 's/^/CAROM-STAT-/' "$POOL/stats"
for wrong in 0 -1 86400001 4294967295 4294967496 x; do
    if echo "$wrong" >"$POOL/idle_ms"; then echo "CAROM-TAKEN $wrong"; fi
done 2>/dev/null
echo "CAROM-IDLE-MS $(cat "$POOL/idle_ms")"
echo 200 >"$POOL/idle_ms"
i=0
while ! grep -qx 'chunks 0' "$POOL/stats"; do
    i=$((i + 1))
    [ $i -lt 100 ] || break
    sleep 0.2
done
sed 's/^/CAROM-IDLE-/' "$POOL/stats"
echo CAROM-MARK idle
sleep 0.5
{verify}
"#,
        verify = workload::fio_verify(8, 32)
    );
    // After the I/O, no slot is in use, so all chunks become idle.
    let guest = guest_with_windows("patch-idle").job(&job);

    let outcome = run(&guest);

    workload::check_verified(&outcome, 2).unwrap_or_else(|error| panic!("{error:#}"));
    assert!(number(&outcome, "CAROM-STAT-chunks") > 0, "console:\n{}", outcome.console);
    assert_eq!(outcome.values("CAROM-TAKEN").collect::<Vec<_>>(), [""; 0]);
    assert_eq!(number(&outcome, "CAROM-IDLE-MS"), 10_000);
    assert_eq!(number(&outcome, "CAROM-IDLE-chunks"), 0, "console:\n{}", outcome.console);
    let host = outcome.counters.first().expect("the mark made the VMM report its counters");
    assert_eq!(host.window_bytes, 0, "{host:?}");
}

/// Job that removes the virtio-iommu while a drive behind it is bound to its driver.
const REMOVE_IOMMU: &str = r#"
viommu=$(readlink -f /sys/bus/virtio/drivers/virtio_iommu/virtio*)
echo 1 >"${viommu%/*}/remove"
[ ! -e "${viommu%/*}" ] || exit 96
[ ! -e "/sys/bus/pci/devices/$NVME/driver" ] || exit 97
"#;

fn iommu_is_removed(name: &str, kernel: Kernel) {
    let job = format!("{WAIT_FOR_NVME}{}{REMOVE_IOMMU}{COMPLAINTS}", workload::fio_verify(2, 16));
    let outcome = run(&guest_with_windows(name).kernel(kernel).job(&job));
    assert_no_complaint(&outcome);
}

#[guest_test]
fn drive_is_unbound_before_its_iommu_is_removed() {
    iommu_is_removed("patch-remove", Kernel::Patched);
}

#[guest_test]
fn drive_is_unbound_before_its_iommu_is_removed_on_the_newer_kernel() {
    iommu_is_removed("patch-remove-newer", Kernel::Newer);
}

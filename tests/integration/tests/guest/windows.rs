// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Patched kernel with bounce windows. The tests check I/O, counters, the budget, pinned memory and caching.

use carom_integration::harness::guest_test;
use carom_integration::workload::{self, WAIT_FOR_NVME};
use carom_integration::{Guest, Kernel, Outcome};

use crate::support::{MIB, SITE, number, run};

/// Shell lines that print the statistics of the guest's pools as lines `CAROM-STAT-<key> <value>`, and make the VMM report its
/// counters.
const STATS: &str = r#"
sed 's/^/CAROM-STAT-/' /sys/kernel/debug/iommu_bounce/*/stats
echo CAROM-MARK stats
sleep 0.5
"#;

fn guest(name: &str, bounce: &str, work: &str) -> Guest {
    Guest::new(name)
        .iommu_device(&SITE.nvme[0])
        .bounce(bounce)
        .cmdline("iommu.strict=1")
        .job(&format!("{WAIT_FOR_NVME}{work}{STATS}"))
}

/// Asserts that guest and VMM counted the same number of chunks, at a moment when the guest was idle.
fn assert_counters_agree(outcome: &Outcome) {
    let host = outcome.counters.first().expect("the mark made the VMM report its counters");
    let served = host.requests.minus(host.failed);
    assert_eq!(number(outcome, "CAROM-STAT-chunk_adds"), served.window_add, "{host:?}");
    assert_eq!(number(outcome, "CAROM-STAT-chunk_dels"), served.window_del, "{host:?}");
    assert_eq!(number(outcome, "CAROM-STAT-chunk_bytes"), host.window_bytes, "{host:?}");
    assert!(host.window_bytes <= host.peak_window_bytes);
}

fn verified(outcome: &Outcome, times: usize) {
    workload::check_verified(outcome, times).unwrap_or_else(|error| panic!("{error:#}"));
}

#[guest_test(by_iommufd)]
fn io_is_verified_and_bounced_and_counters_agree() {
    let work = workload::fio_verify(32, 64).repeat(2);

    let outcome = run(&guest("windows-verify", "size=64M", &work));

    verified(&outcome, 2);
    assert_counters_agree(&outcome);
    assert_eq!(outcome.value("CAROM-STAT-provider").unwrap_or_default(), "windows");
    let bounced = number(&outcome, "CAROM-STAT-bounced_pages") + number(&outcome, "CAROM-STAT-bounced_lists");
    let host = outcome.counters[0];
    assert!(bounced > 1000, "bounced {bounced}; console:\n{}", outcome.console);
    // Without a window, the guest would map each buffer that bounced here.
    assert!(host.requests.maps() < bounced / 2, "{bounced} bounced, but {host:?}");
    // The job reads 64 MiB in total, and nearly all of these bytes bounce. The guest maps a request only if the pool has no slot for the
    // request yet.
    assert!(number(&outcome, "CAROM-STAT-bytes_out") >= 48 * MIB, "too few bytes were copied from slots");
}

/// Shell line that prints the address of the windows.
const PLACE: &str = r"
dmesg | sed -n 's/.*bounce windows: IOVA \(0x[0-9a-f]*\)-.*/CAROM-WINDOW \1/p'
";

fn windows_above_4_gib(kernel: Kernel) {
    let work = format!("{PLACE}{}", workload::fio_verify(16, 64));

    let outcome = run(&guest("windows-high", "size=64M,aperture=high", &work).kernel(kernel));

    verified(&outcome, 1);
    assert_counters_agree(&outcome);
    assert!(number(&outcome, "CAROM-WINDOW") >= 4096 * MIB, "console:\n{}", outcome.console);
    let bounced = number(&outcome, "CAROM-STAT-bounced_pages") + number(&outcome, "CAROM-STAT-bounced_lists");
    let host = outcome.counters[0];
    assert!(bounced > 500 && host.requests.maps() < bounced / 2, "{bounced} bounced, {host:?}");
}

#[guest_test]
fn io_is_verified_and_bounced_through_windows_above_4_gib() {
    windows_above_4_gib(Kernel::Patched);
}

#[guest_test(slow = "the same test runs on the older kernel")]
fn io_is_verified_and_bounced_above_4_gib_on_the_newer_kernel() {
    windows_above_4_gib(Kernel::Newer);
}

#[guest_test]
fn two_vcpus_with_several_jobs_are_verified() {
    let work = "fio --direct=1 --ioengine=libaio --iodepth=16 --rw=randwrite --bssplit=4k/50:32k/30:128k/20 --size=4M \
                --offset_increment=16M --numjobs=4 --verify=crc32c --verify_fatal=1 --do_verify=1 --group_reporting \
                --filename=/dev/nvme0n1 --name=many --output-format=terse --terse-version=3 >/tmp/verify 2>&1\n\
                status=$?; [ $status = 0 ] || cat /tmp/verify\n\
                echo \"CAROM-VERIFY $status $(awk -F';' '/^3;/ { print $6 * 1024 }' /tmp/verify)\"\n";

    let outcome = run(&guest("windows-two-vcpus", "size=64M", work).cpus(2));

    verified(&outcome, 1);
    assert_counters_agree(&outcome);
}

#[guest_test(slow = "two_vcpus_* and others cover the same windows in strict mode")]
fn lazy_mode_uses_windows_too() {
    let guest = Guest::new("windows-lazy")
        .iommu_device(&SITE.nvme[0])
        .bounce("size=64M")
        .cmdline("iommu.strict=0")
        .job(&format!("{WAIT_FOR_NVME}{}{STATS}", workload::fio_verify(16, 32)));

    let outcome = run(&guest);

    verified(&outcome, 1);
    assert_counters_agree(&outcome);
    assert!(number(&outcome, "CAROM-STAT-chunk_adds") > 0);
}

#[guest_test]
fn exhausted_budget_falls_back_and_loses_nothing() {
    let outcome = run(&guest("windows-exhausted", "size=4M", &workload::fio_verify(16, 64)));

    verified(&outcome, 1);
    assert_counters_agree(&outcome);
    let host = outcome.counters[0];
    assert!(number(&outcome, "CAROM-STAT-fallback_full") > 0, "console:\n{}", outcome.console);
    assert!(host.requests.maps() > 0, "nothing was mapped, although the budget is too small for all I/O: {host:?}");
    assert!(host.peak_window_bytes <= 4 * MIB, "{host:?}");
}

#[guest_test]
fn pinned_memory_is_bounded_by_budget_and_live_mappings() {
    let budget = 32 * MIB;
    let work = workload::fio_verify(16, 64);

    let outcome = run(&guest("windows-pinned", "size=32M", &work).memory_mib(2048));

    verified(&outcome, 1);
    let host = outcome.counters.last().expect("the VMM reports its counters at the end");
    assert!(host.peak_window_bytes <= budget, "{host:?}");
    assert!(
        outcome.peak_pinned_bytes <= host.peak_window_bytes + host.peak_mapped_bytes,
        "{} bytes pinned: {host:?}",
        outcome.peak_pinned_bytes
    );
    assert!(
        outcome.peak_pinned_bytes < 2048 * MIB / 20,
        "{} bytes pinned, 5 % of RAM allowed",
        outcome.peak_pinned_bytes
    );
    assert!(outcome.peak_pinned_bytes > 0, "nothing is pinned, so the test shows nothing");
}

#[guest_test(slow = "pinned_memory_is_bounded_by_budget_and_live_mappings covers the bound with windows")]
fn without_windows_only_live_mappings_are_pinned() {
    let guest = Guest::new("strict-pinned")
        .iommu_device(&SITE.nvme[0])
        .memory_mib(2048)
        .cmdline("iommu.strict=1")
        .job(&format!("{WAIT_FOR_NVME}{}", workload::fio_verify(16, 64)));

    let outcome = run(&guest);

    verified(&outcome, 1);
    let host = outcome.counters.last().expect("the VMM reports its counters at the end");
    assert_eq!((host.requests.window_add, host.peak_window_bytes), (0, 0));
    assert!(outcome.peak_pinned_bytes <= host.peak_mapped_bytes, "{} pinned: {host:?}", outcome.peak_pinned_bytes);
    assert!(outcome.peak_pinned_bytes < 2048 * MIB / 20, "{} bytes pinned", outcome.peak_pinned_bytes);
}

#[guest_test]
fn window_memory_is_mapped_write_back() {
    // Read the caching mode from the guest kernel's list. The emulated machine does not model caching, so the speed does not
    // show the mode.
    let work = format!(
        "{}{}",
        workload::fio_verify(4, 16),
        r#"
for device in /sys/bus/pci/devices/*; do
    [ "$(cat "$device/vendor")$(cat "$device/device")" = 0x1af40x1057 ] || continue
    sed 's/^/CAROM-BAR /' "$device/resource"
done
sed -n 's/^PAT: \[mem \(0x[0-9a-f]*\)-\(0x[0-9a-f]*\)\] /CAROM-PAT \1 \2 /p' /sys/kernel/debug/x86/pat_memtype_list
"#
    );

    let outcome = run(&guest("windows-caching", "size=64M", &work));

    let hex = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).expect("a hexadecimal number");
    // Columns of `resource`: start, end, flags; 0x2000 is IORESOURCE_PREFETCH.
    let region = outcome
        .values("CAROM-BAR")
        .map(|line| line.split(' ').map(hex).collect::<Vec<_>>())
        .find(|columns| columns[2] & 0x2000 != 0)
        .expect("virtio-iommu has a prefetchable BAR");
    let types: Vec<&str> = outcome
        .values("CAROM-PAT")
        .filter_map(|line| {
            let (start, rest) = line.split_once(' ')?;
            let (end, caching) = rest.split_once(' ')?;
            (hex(start) <= region[1] && hex(end) > region[0]).then_some(caching.trim())
        })
        .collect();
    assert!(!types.is_empty(), "no mapping of the region at {:#x}; console:\n{}", region[0], outcome.console);
    assert!(types.iter().all(|caching| *caching == "write-back"), "{types:?}");
}

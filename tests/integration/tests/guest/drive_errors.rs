// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Contents of the buffers of bounced reads. After a read, a buffer may contain only data from the drive or the buffer's
//! previous contents. No other data from a slot may be copied to the buffer. The tests check buffers after failed reads and
//! after passthrough commands. One test runs without an IOMMU, and its I/O bounces through swiotlb.

use carom_integration::harness::guest_test;
use carom_integration::workload::WAIT_FOR_NVME;
use carom_integration::{Guest, Kernel, Outcome};

use crate::support::{SITE, number, required, run};

/// Number of cases of `nvme-check`.
const CASES: usize = 9;

/// Returns the address of the second drive, whose reads fail at one offset. Also returns a job that checks buffers, and then
/// runs the shell lines `then`.
fn drive_and_job(then: &str) -> (&'static str, String) {
    let drive = required(SITE.nvme.get(1), "a second NVMe drive (CAROM_NVME2)");
    let bad = required(SITE.nvme2_bad.as_ref(), "an offset at which reads of this drive fail (CAROM_NVME2_BAD)");
    // Without huge pages, a large buffer consists of several physical ranges. The results are printed from a file, so that
    // kernel messages do not interrupt them.
    let job = format!(
        "{WAIT_FOR_NVME}echo never >/sys/kernel/mm/transparent_hugepage/enabled\n\
         nvme-check /dev/nvme0n1 {bad} >/tmp/checked && right=1\n\
         cat /tmp/checked\n\
         [ \"$right\" = 1 ] || exit 96\n\
         {then}\n"
    );
    (drive, job)
}

fn expect_all_right(outcome: &Outcome) {
    let right = outcome.console.lines().filter(|line| line.starts_with("nvme-check: ") && line.ends_with(": right"));
    assert_eq!(right.count(), CASES, "console:\n{}", outcome.console);
}

fn buffers_are_right(name: &str, kernel: Kernel) {
    let (drive, job) = drive_and_job("sed 's/^/CAROM-STAT-/' /sys/kernel/debug/iommu_bounce/*/stats");

    let guest = Guest::new(name).kernel(kernel).iommu_device(drive).bounce("size=64M").cmdline("iommu.strict=1");
    let outcome = run(&guest.job(&job));

    expect_all_right(&outcome);
    // At least three failed reads are ordinary requests of the block layer, and not passthrough commands. For these reads, the
    // kernel must not copy the slot back to the buffer.
    assert!(number(&outcome, "CAROM-STAT-not_copied_back") >= 3, "console:\n{}", outcome.console);
    assert_eq!(number(&outcome, "CAROM-STAT-slots_orphaned"), 0, "console:\n{}", outcome.console);
}

#[guest_test(needs(FailingDrive))]
fn buffers_keep_their_contents_when_reads_fail() {
    buffers_are_right("drive-errors", Kernel::Patched);
}

#[guest_test(
    needs(FailingDrive),
    slow = "the same test runs on the older kernel, and kunit_passes_* runs on this kernel"
)]
fn buffers_keep_their_contents_when_reads_fail_on_newer_kernel() {
    buffers_are_right("drive-errors-newer", Kernel::Newer);
}

/// swiotlb also honours the patch's DMA attributes for bounced reads. Before an NVMe read, the kernel does not copy the
/// request's buffer to swiotlb's buffer. So the kernel may copy swiotlb's buffer back only after a successful read.
#[guest_test(needs(FailingDrive), slow = "tests the guest patch's changes of swiotlb, which rarely change")]
fn buffers_keep_their_contents_when_reads_fail_through_swiotlb() {
    let (drive, job) = drive_and_job("echo \"CAROM-SWIOTLB $(cat /sys/kernel/debug/swiotlb/io_tlb_used_hiwater)\"");

    // On Linux 7.3, `swiotlb=track_hiwater` makes the kernel record the maximum use of swiotlb. Other kernels always record it,
    // and ignore the option.
    let guest = Guest::new("drive-errors-swiotlb").cmdline("swiotlb=force swiotlb=track_hiwater");
    let outcome = run(&guest.device(drive).job(&job));

    expect_all_right(&outcome);
    assert!(number(&outcome, "CAROM-SWIOTLB") > 0, "nothing went through swiotlb:\n{}", outcome.console);
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Drive with metadata for each block. Each request has separate memory for its metadata, which bounces like data. The
//! metadata protects the block (protection information, type 1): the drive checks the metadata on writes, and the kernel
//! checks the metadata on reads.

use carom_integration::harness::guest_test;
use std::time::Duration;

use carom_integration::workload::{self, WAIT_FOR_NVME};
use carom_integration::{Guest, Kernel, Vmm};

use crate::support::{COMPLAINTS, MIB, assert_no_complaint, number, run};

fn blocks_and_metadata_are_verified(name: &str, kernel: Kernel) {
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(32 * MIB).unwrap();
    let job = format!(
        r#"{WAIT_FOR_NVME}echo "CAROM-FORMAT $(cat /sys/block/nvme0n1/integrity/format)"
POOL=$(grep -lx "device $NVME" /sys/kernel/debug/iommu_bounce/*/stats)
bounced() {{ awk '/^bounced_/ {{ n += $2 }} END {{ print n }}' "$POOL"; }}
requests() {{ awk '{{ print $1 + $5 }}' /sys/block/nvme0n1/stat; }}
START=$(bounced) FIRST=$(requests)
{verify}echo "CAROM-REQUESTS $(($(requests) - FIRST))"
echo "CAROM-BOUNCED $(($(bounced) - START))"
{COMPLAINTS}"#,
        verify = workload::fio_verify(8, 16)
    );
    let guest = Guest::new(name)
        .kernel(kernel)
        .vmm(Vmm::Qemu)
        .metadata_drive(image.path())
        .cmdline("iommu.strict=1 iommu.bounce=256K")
        .time_limit(Duration::from_secs(150))
        .job(&job);

    let outcome = run(&guest);

    assert_no_complaint(&outcome);
    assert_eq!(outcome.value("CAROM-FORMAT").unwrap_or_default(), "T10-DIF-TYPE1-CRC");
    workload::check_verified(&outcome, 1).unwrap_or_else(|error| panic!("{error:#}"));
    let (requests, bounced) = (number(&outcome, "CAROM-REQUESTS"), number(&outcome, "CAROM-BOUNCED"));
    assert!(requests > 200, "console:\n{}", outcome.console);
    // Each request has two buffers that bounce: data and metadata. Only the first few requests do not bounce, because the pool
    // has no chunk yet.
    assert!(bounced > requests * 3 / 2, "{bounced} of {requests}; console:\n{}", outcome.console);
}

#[guest_test]
fn drive_with_metadata_is_verified() {
    blocks_and_metadata_are_verified("metadata", Kernel::Patched);
}

#[guest_test(slow = "the same test runs on the older kernel, and io_is_verified_and_bounced_* runs on this kernel")]
fn drive_with_metadata_is_verified_on_the_newer_kernel() {
    blocks_and_metadata_are_verified("metadata-newer", Kernel::Newer);
}

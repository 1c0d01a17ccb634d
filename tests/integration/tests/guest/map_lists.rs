// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Large buffers of a guest in strict mode. The patched kernel maps all pages of such a buffer by one request, and does not split it into
//! small requests to the drive.

use carom_integration::harness::guest_test;
use carom_integration::workload::{self, WAIT_FOR_NVME};
use carom_integration::{Guest, Kernel};

use crate::support::{SITE, number, run};

/// Shell line that prints the maximum size in KiB of a request to the drive.
const LIMIT: &str = "echo CAROM-LIMIT $(cat /sys/block/nvme0n1/queue/max_hw_sectors_kb)\n";

/// Shell lines that write blocks of 512 KiB, and read them back and check them. Then they make the VMM report its counters.
const LARGE: &str = r"
[ ! -e /sys/kernel/mm/transparent_hugepage/enabled ] || echo never >/sys/kernel/mm/transparent_hugepage/enabled
fio --name=verify --filename=/dev/nvme0n1 --direct=1 --rw=randwrite --ioengine=libaio --iodepth=8 --bs=512k --size=32M \
    --verify=crc32c --do_verify=1 --verify_fatal=1 --verify_dump=0 --output-format=terse --terse-version=3 >/tmp/verify 2>&1
status=$?
[ $status = 0 ] || cat /tmp/verify
echo CAROM-VERIFY $status $(awk -F';' '/^3;/ { print $6 * 1024 }' /tmp/verify)
echo CAROM-MARK large
sleep 0.5
";

fn large_buffers_take_few_requests(kernel: Kernel) {
    let guest = Guest::new("map-lists").kernel(kernel).iommu_device(&SITE.nvme[0]).cmdline("iommu.strict=1");

    let outcome = run(&guest.job(&format!("{WAIT_FOR_NVME}{LIMIT}{LARGE}")));

    workload::check_verified(&outcome, 1).unwrap_or_else(|error| panic!("{error:#}"));
    let counters = outcome.counters[0];
    println!("map-lists: {counters:?}");
    assert!(number(&outcome, "CAROM-LIMIT") >= 512, "the driver splits blocks; console:\n{}", outcome.console);
    // The job writes and reads 64 blocks each. A block whose pages are adjacent in memory needs no list.
    let maps = counters.requests.maps();
    assert!(counters.requests.map_list >= 64 && maps < 4 * 128, "{counters:?}");
    assert_eq!(counters.failed.maps(), 0, "{counters:?}");
    assert_eq!((counters.faults, counters.faults_dropped), (0, 0), "{counters:?}");
    // Without lists, each host call would be for a request of its own.
    assert!(maps * 4 < counters.host_maps, "{counters:?}");
}

#[guest_test(by_iommufd)]
fn large_buffers_are_mapped_by_lists() {
    large_buffers_take_few_requests(Kernel::Patched);
}

#[guest_test]
fn newer_kernel_maps_large_buffers_by_lists() {
    large_buffers_take_few_requests(Kernel::Newer);
}

/// The guest bounces through its own pages. Larger requests would not bounce.
#[guest_test]
fn drives_in_a_domain_with_a_pool_get_small_requests() {
    let guest = Guest::new("map-lists-pool").iommu_device(&SITE.nvme[0]).cmdline("iommu.strict=1 iommu.bounce=auto");

    let outcome = run(&guest.job(&format!("{WAIT_FOR_NVME}{LIMIT}")));

    assert_eq!(number(&outcome, "CAROM-LIMIT"), 128, "console:\n{}", outcome.console);
}

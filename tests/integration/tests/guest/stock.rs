// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Debian's unmodified kernel on the virtio-iommu, with a passed-through NVMe drive. [`crate::hotplug`] tests this kernel on a
//! VM that offers windows.

use carom_integration::harness::guest_test;
use std::time::Duration;

use carom_integration::workload::{self, WAIT_FOR_NVME};
use carom_integration::{Guest, Kernel, Outcome};

use crate::support::{MIB, SITE, run};

fn job() -> String {
    format!(
        "{WAIT_FOR_NVME}\necho \"CAROM-TYPE $(cat \"/sys/bus/pci/devices/$NVME/iommu_group/type\")\"\n{}",
        workload::fio_verify(8, 32)
    )
}

fn guest(name: &str) -> Guest {
    Guest::new(name)
        .kernel(Kernel::Stock)
        .memory_mib(1024)
        .iommu_device(&SITE.nvme[0])
        .time_limit(Duration::from_secs(180))
        .job(&job())
}

/// Checks verified I/O, the domain's type, and the numbers of ATTACH and MAP requests. Returns the counters of requests.
fn check(outcome: &Outcome, domain_type: &str) -> carom_integration::events::Requests {
    workload::check_verified(outcome, 1).unwrap_or_else(|error| panic!("{error:#}"));
    assert_eq!(outcome.value("CAROM-TYPE").unwrap_or_default(), domain_type);
    let counters = outcome.counters.last().expect("the device reports its counters at the end");
    assert!(counters.requests.attach >= 1);
    // The job writes and reads 8 MiB in about 400 requests of mixed sizes, and the guest maps each request.
    assert!(counters.requests.map >= 2 * 16 * 8, "{counters:?}");
    counters.requests
}

#[guest_test(
    slow = "lazy_io_is_verified covers this kernel, and without_windows_only_live_mappings_are_pinned covers the remaining mappings"
)]
fn strict_io_is_verified() {
    let outcome = run(&guest("stock-strict").cmdline("iommu.strict=1"));

    let requests = check(&outcome, "DMA");
    assert!(requests.unmap > 0, "{requests:?}");
    // The guest unmaps each buffer at the end of its DMA. Only the driver's queues and pools stay mapped.
    let left = outcome.counters.last().map(|counters| counters.mapped_bytes);
    assert!(left.is_some_and(|bytes| bytes < 4 * MIB), "{left:?} bytes are still mapped");
}

#[guest_test(slow = "windows::lazy_mode_uses_windows_too covers lazy mode with windows")]
fn lazy_io_is_verified() {
    let outcome = run(&guest("stock-lazy").cmdline("iommu.strict=0"));

    let requests = check(&outcome, "DMA-FQ");
    assert!(requests.unmap > 0, "{requests:?}");
}

#[guest_test(slow = "unit tests cover bypass domains; in many tests, devices without the virtio-iommu access all RAM")]
fn passthrough_domain_maps_all_ram_once() {
    let outcome = run(&guest("stock-identity").cmdline("iommu.passthrough=1"));

    workload::check_verified(&outcome, 1).unwrap_or_else(|error| panic!("{error:#}"));
    assert_eq!(outcome.value("CAROM-TYPE").unwrap_or_default(), "identity");
    let counters = outcome.counters.last().expect("the device reports its counters at the end");
    assert_eq!((counters.requests.map, counters.failed.attach), (0, 0), "{counters:?}");
    assert!(counters.peak_mapped_bytes >= 1024 * MIB, "bypass did not map all RAM: {counters:?}");
}

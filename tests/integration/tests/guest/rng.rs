// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! virtio-rng: random bytes for a real guest. Three cases are tested: the device is not behind the virtio-iommu, is behind it
//! without windows, or is behind it with a window.

use carom_integration::harness::guest_test;
use carom_integration::{Guest, Outcome};

use crate::support::{number, run};

/// Job that reads 2 KiB twice. It prints the source, the number of bytes, and 1 if both reads returned the same bytes.
const READ: &str = r#"
echo "CAROM-RNG $(cat /sys/class/misc/hw_random/rng_current)"
for round in 1 2; do
    dd if=/dev/hwrng of=/tmp/random$round bs=64 count=32 iflag=fullblock 2>/dev/null
done
echo "CAROM-BYTES $(cat /tmp/random1 /tmp/random2 | wc -c)"
echo "CAROM-ALIKE $(cmp -s /tmp/random1 /tmp/random2 && echo 1 || echo 0)"
echo CAROM-MARK rng
sleep 0.5
"#;

fn reads(guest: Guest) -> Outcome {
    let outcome = run(&guest.memory_mib(512).job(READ));
    assert!(outcome.value("CAROM-RNG").unwrap().starts_with("virtio_rng"), "console:\n{}", outcome.console);
    assert_eq!(number(&outcome, "CAROM-BYTES"), 4096);
    assert_eq!(number(&outcome, "CAROM-ALIKE"), 0, "random bytes repeat");
    assert!(outcome.events.iter().any(|event| event.event == "activated"));
    outcome
}

#[guest_test]
fn guest_reads_random_bytes_of_a_device_without_iommu() {
    let outcome = reads(Guest::new("rng-beside").rng("src=/dev/urandom"));

    assert!(outcome.counters.is_empty(), "the VM has a virtio-iommu, but needs none");
}

#[guest_test]
fn device_behind_the_iommu_writes_through_mappings() {
    let outcome = reads(Guest::new("rng-mapped").cmdline("iommu.strict=1").rng("iommu=on"));

    let host = outcome.counters.last().expect("the mark made the VMM report its counters");
    assert!(host.requests.maps() > 8 && host.requests.unmap > 8, "not every buffer was mapped: {host:?}");
    assert_eq!((host.faults, host.window_bytes), (0, 0));
}

#[guest_test]
fn device_behind_the_iommu_writes_through_a_window() {
    let guest = Guest::new("rng-window").cmdline("iommu.strict=1").rng("iommu=on").bounce("size=16M");

    let outcome = reads(guest);

    let host = outcome.counters.last().expect("the mark made the VMM report its counters");
    // The last report is from the end of the guest, when it has no windows any more. So check the peak.
    assert!(host.requests.window_add > 0 && host.peak_window_bytes > 0, "the device had no window: {host:?}");
    // The device filled at least 64 buffers. The driver maps only the rings, and the buffers that it used before it had a
    // window.
    assert!(host.requests.maps() < 32, "small buffers did not use the window: {host:?}");
    assert_eq!(host.faults, 0);
}

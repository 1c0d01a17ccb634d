// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Debian's own kernels with the module of `guest/module`, which takes the place of their driver of the virtio-iommu.

use std::time::Duration;

use carom_integration::harness::guest_test;
use carom_integration::workload::{self, BLOCK_SIZES, WAIT_FOR_NVME};
use carom_integration::{Guest, Kernel, Outcome};

use crate::support::{COMPLAINTS, MIB, SITE, assert_no_complaint, required, run};

/// Prints what the module counted for the drive since it has its driver, and has the VMM report its counters.
const STATS: &str = "
sed 's/^/CAROM-STAT-/' /sys/kernel/debug/virtio_iommu_bounce/$NVME/stats
echo CAROM-MARK stats
sleep 0.5
";

/// Takes the module away and loads it again, with the parameters that are given; the drive comes and goes with it.
const LOAD: &str = r#"
load() {
    echo "$NVME" >/sys/bus/pci/drivers/nvme/unbind || exit 92
    rmmod virtio_iommu_bounce || exit 93
    insmod /modules/virtio_iommu_bounce.ko "$@" || exit 94
    echo "$NVME" >/sys/bus/pci/drivers/nvme/bind || exit 95
    wait_for_nvme
}
"#;

/// Verifies I/O of several processes at once.
const MANY: &str = "
fio --direct=1 --ioengine=libaio --iodepth=16 --rw=randwrite --bssplit=4k/50:32k/30:128k/20 --size=4M --offset_increment=16M --numjobs=4 \
    --verify=crc32c --verify_fatal=1 --do_verify=1 --group_reporting --filename=/dev/nvme0n1 --name=many --output-format=terse \
    --terse-version=3 >/tmp/verify 2>&1
status=$?
[ $status = 0 ] || cat /tmp/verify
echo \"CAROM-VERIFY $status $(awk -F';' '/^3;/ { print $6 * 1024 }' /tmp/verify)\"
";

/// Gives the drive up, as the kernel may reset the virtio-iommu before the drive when it shuts down.
const UNBIND: &str = "
echo \"$NVME\" >/sys/bus/pci/drivers/nvme/unbind
echo CAROM-MARK unbound
sleep 0.5
";

fn guest(name: &str, kernel: Kernel, drive: &str, work: &str) -> Guest {
    Guest::new(name)
        .kernel(kernel)
        .memory_mib(1024)
        .iommu_device(drive)
        .bounce("size=64M")
        .time_limit(Duration::from_secs(240))
        .job(&format!("{WAIT_FOR_NVME}{LOAD}{work}{COMPLAINTS}{UNBIND}"))
}

fn verified(outcome: &Outcome, times: usize) {
    workload::check_verified(outcome, times).unwrap_or_else(|error| panic!("{error:#}"));
    assert_no_complaint(outcome);
}

/// All of the verified I/O goes through windows, but for what finds no slot; then, without bouncing, all of it is mapped; after each
/// of the two, nothing is left of the drive's domain.
fn io_is_verified(name: &str, kernel: Kernel) {
    let verify = workload::fio_verify(16, 64);
    let work = format!("{verify}{MANY}{STATS}load bounce=0\n{verify}{STATS}");

    let outcome = run(&guest(name, kernel, &SITE.nvme[0], &work).cpus(2));

    verified(&outcome, 3);
    // The VMM reports once more when it ends.
    let [with, without, unbound, _] = outcome.counters[..] else { panic!("{:?}", outcome.counters) };
    let stat = |key: &str| -> Vec<u64> {
        outcome.values(&format!("CAROM-STAT-{key}")).map(|value| value.parse().expect("a number")).collect()
    };
    let (bounced, chunks) = (stat("bounced"), stat("chunks"));
    assert!(bounced[0] > 500 && bounced[1] == 0, "bounced: {bounced:?}");
    assert_eq!(with.requests.minus(with.failed).window_add, chunks[0], "{with:?}");
    assert_eq!(with.window_bytes, chunks[0] * 2 * MIB, "{with:?}");
    // Queues and pools of the driver stay mapped.
    assert!(with.requests.map < bounced[0] / 10, "{bounced:?} bounced, but {with:?}");
    assert!(without.requests.map - with.requests.map > bounced[0] / 2, "{with:?}, then {without:?}");
    assert_eq!((without.window_bytes, without.faults), (0, 0), "{without:?}");
    assert_eq!((unbound.mapped_bytes, unbound.window_bytes), (0, 0), "{unbound:?}");
}

#[guest_test(slow = "of the prototype for unpatched kernels, of which nothing else depends")]
fn io_of_debians_kernel_is_bounced_and_verified() {
    io_is_verified("module", Kernel::StockModule);
}

#[guest_test(slow = "of the prototype for unpatched kernels, of which nothing else depends")]
fn io_of_a_kernel_that_knows_no_virtio_iommu_is_bounced_and_verified() {
    io_is_verified("module-older", Kernel::OlderStockModule);
}

#[guest_test(slow = "of the prototype for unpatched kernels, of which nothing else depends")]
fn exhausted_budget_has_the_rest_mapped() {
    let work = format!("{}{STATS}", workload::fio_verify(16, 64));

    let outcome = run(&guest("module-exhausted", Kernel::StockModule, &SITE.nvme[0], &work).bounce("size=4M"));

    verified(&outcome, 1);
    let without_slot: u64 = outcome.value("CAROM-STAT-no_slot").unwrap().parse().unwrap();
    let host = outcome.counters[0];
    assert!(without_slot > 100 && host.requests.map > without_slot, "{without_slot} found no slot, {host:?}");
    assert_eq!((host.window_bytes, host.faults), (4 * MIB, 0), "{host:?}");
    // It asks again once a second for each size of slots, not for each DMA.
    assert!(host.failed.window_add >= 1 && host.failed.window_add < without_slot / 4, "{without_slot}, {host:?}");
}

/// Buffers keep what the drive has not written: it fails to read, or writes less than it was given.
#[guest_test(needs(FailingDrive), slow = "of the prototype for unpatched kernels, of which nothing else depends")]
fn buffers_keep_what_they_had() {
    let drive = required(SITE.nvme.get(1), "a second NVMe drive (CAROM_NVME2)");
    let bad = required(SITE.nvme2_bad.as_ref(), "a place where its reads fail (CAROM_NVME2_BAD)");
    let work = format!(
        "echo never >/sys/kernel/mm/transparent_hugepage/enabled\nnvme-check /dev/nvme0n1 {bad} || exit 96\n{STATS}"
    );

    let outcome = run(&guest("module-buffers", Kernel::OlderStockModule, drive, &work));

    assert_no_complaint(&outcome);
    let bounced: u64 = outcome.value("CAROM-STAT-bounced").unwrap().parse().unwrap();
    assert!(bounced > 20, "console:\n{}", outcome.console);
}

/// How often each way of reading is measured.
const ROUNDS: usize = 3;

/// The operations a second of fio at a block size, in the order of the runs.
fn iops(outcome: &Outcome, size: &str) -> Vec<f64> {
    let figure = |line: &str| line.strip_prefix(size)?.split_whitespace().next()?.parse().ok();
    outcome.values("CAROM-FIO").filter_map(figure).collect()
}

fn middle(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Reads of all sizes with bouncing and without, in turns; bouncing is ahead for small ones. Returns the operations a second with
/// bouncing, by size.
fn bouncing_pays(name: &str, kernel: Kernel) -> Vec<f64> {
    let reads = workload::fio_reads(1, 1);
    let round = format!("{reads}load bounce=0\n{reads}load\n");

    let guest = guest(name, kernel, &SITE.nvme[0], &round.repeat(ROUNDS));
    let outcome = run(&guest.time_limit(Duration::from_secs(400)));

    assert_no_complaint(&outcome);
    let mut bounced = Vec::new();
    for size in BLOCK_SIZES {
        let figures = iops(&outcome, size);
        assert_eq!(figures.len(), 2 * ROUNDS, "console:\n{}", outcome.console);
        let ratio = middle(figures.chunks(2).map(|pair| pair[0] / pair[1]).collect());
        println!("{name}: reads of {size}, with bouncing and without in turns: {figures:.0?} IOPS, ratio {ratio:.2}");
        assert!(!["4k", "16k"].contains(&size) || ratio > 1.0, "{size}: {figures:?}");
        bounced.push(middle(figures.into_iter().step_by(2).collect()));
    }
    bounced
}

/// Ahead also of the kernel's own driver, in strict mode.
#[guest_test(slow = "of the prototype for unpatched kernels, of which nothing else depends")]
fn bouncing_pays_on_debians_kernel() {
    let bounced = bouncing_pays("module-fio", Kernel::StockModule);
    let own = Guest::new("module-fio-own")
        .kernel(Kernel::Stock)
        .memory_mib(1024)
        .iommu_device(&SITE.nvme[0])
        .cmdline("iommu.strict=1")
        .time_limit(Duration::from_secs(240))
        .job(&format!("{WAIT_FOR_NVME}{}", workload::fio_reads(1, 1).repeat(ROUNDS)));

    let outcome = run(&own);

    for (size, bounced) in BLOCK_SIZES.into_iter().zip(bounced) {
        let figures = iops(&outcome, size);
        assert_eq!(figures.len(), ROUNDS, "console:\n{}", outcome.console);
        let ratio = bounced / middle(figures.clone());
        println!("reads of {size} by the kernel's own driver: {figures:.0?} IOPS, ratio {ratio:.2}");
        assert!(size != "4k" || ratio > 1.0, "{size}: {figures:?}");
    }
}

#[guest_test(slow = "of the prototype for unpatched kernels, of which nothing else depends")]
fn bouncing_pays_on_a_kernel_that_knows_no_virtio_iommu() {
    bouncing_pays("module-fio-older", Kernel::OlderStockModule);
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Events that end a domain and its windows: reboots, resets, unbinding of the device's driver, and attaching of the device to
//! another domain.

use carom_integration::harness::guest_test;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use carom_integration::workload::{self, WAIT_FOR_NVME};
use carom_integration::{Guest, Kernel, Outcome};

use crate::support::edu::{FIND_EDU, TEST_EDU};
use crate::support::{COMPLAINTS, MIB, SITE, assert_no_complaint, guest_with_windows, number, required, run};

/// Returns a unique text, which differs from all texts that earlier runs left on the drive.
fn unique() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("the clock is past 1970");
    format!("carom-{}", now.as_nanos())
}

/// Shell function `marker [TEXT]`: reads or writes the drive's last 4 KiB.
const MARKER: &str = r#"
LAST=$(($(blockdev --getsz /dev/nvme0n1) / 8 - 1))
marker() {
    if [ $# = 0 ]; then
        dd if=/dev/nvme0n1 bs=4096 skip=$LAST count=1 2>/dev/null | head -c 64 | tr -d '\000'
    else
        printf '%s' "$1" >/tmp/marker
        dd if=/tmp/marker of=/dev/nvme0n1 bs=4096 seek=$LAST conv=sync,fsync 2>/dev/null
    fi
}
"#;

/// Returns a job for three boots of a guest. In each boot, the job prints the previous boot's marker and verifies I/O. At the
/// end of the first two boots, it writes a new marker and runs `restart`.
pub(crate) fn three_boots(restart: &str) -> String {
    let id = unique();
    let verify = workload::fio_verify(8, 32);
    format!(
        r#"{WAIT_FOR_NVME}{MARKER}
FOUND=$(marker)
echo "CAROM-BOOT ${{FOUND#{id}-}}"
{verify}
case $FOUND in
{id}-2) marker {id}-done ;;
{id}-1) marker {id}-2; {restart} ;;
*) marker {id}-1; {restart} ;;
esac
"#
    )
}

fn reboots_twice(name: &str, bounce: Option<&str>) {
    let job = three_boots("touch /reboot-requested");
    let mut guest = Guest::new(name).iommu_device(&SITE.nvme[0]).cmdline("iommu.strict=1").job(&job);
    if let Some(bounce) = bounce {
        guest = guest.bounce(bounce);
    }

    let outcome = run(&guest);

    // Each boot prints a line with the number of the marker that the previous boot wrote.
    let boots: Vec<&str> = outcome.console.lines().filter_map(|line| line.strip_prefix("CAROM-BOOT ")).collect();
    assert_eq!(boots.len(), 3, "console:\n{}", outcome.console);
    assert_eq!(boots[1..], ["1", "2"], "console:\n{}", outcome.console);
    workload::check_verified(&outcome, 3).unwrap_or_else(|error| panic!("{error:#}"));
    if bounce.is_some() {
        // Each boot requested chunks for its own window.
        assert!(
            outcome.counters.last().is_some_and(|counters| counters.requests.window_add >= 3),
            "{:?}",
            outcome.counters
        );
    }
}

/// Checks that a guest boots again after an emergency restart, without a shutdown. `guest` creates the guest for a job.
fn restarts(guest: impl FnOnce(&str) -> Guest) -> Outcome {
    let id = unique();
    let job = format!(
        r#"{WAIT_FOR_NVME}{MARKER}
if [ "$(marker)" = {id} ]; then
    echo CAROM-RESTARTED
else
    marker {id}
    echo b >/proc/sysrq-trigger
    sleep 60
fi
"#
    );

    let outcome = run(&guest(&job));

    assert!(outcome.console.contains("CAROM-RESTARTED"), "console:\n{}", outcome.console);
    outcome
}

#[guest_test(slow = "triple_fault_resets_the_guest covers restarts, and hotplug::stock_kernel_* covers this kernel")]
fn distributions_kernel_restarts_without_firmware() {
    // Debian's kernel is built with EFI support, so it does not use the ACPI reset register of a machine without firmware.
    restarts(|job| Guest::new("restart-stock").kernel(Kernel::Stock).iommu_device(&SITE.nvme[0]).job(job));
}

#[guest_test]
fn triple_fault_resets_the_guest() {
    let name = "restart-triple-fault";
    let outcome = restarts(|job| Guest::new(name).iommu_device(&SITE.nvme[0]).cmdline("reboot=t").job(job));
    assert!(outcome.stderr.contains("triple fault"), "the VMM said:\n{}", outcome.stderr);
}

#[guest_test]
fn reboot_under_windows_loses_nothing() {
    reboots_twice("reboot-bounce", Some("size=64M"));
}

#[guest_test(slow = "reboot_under_windows_loses_nothing covers the reboot")]
fn reboot_without_windows_loses_nothing() {
    reboots_twice("reboot-strict", None);
}

#[guest_test(slow = "unit tests cover parked chunks, and reboot_under_windows_loses_nothing covers the kernels")]
fn reset_of_the_vm_parks_windows_for_the_next_kernel() {
    // Emergency restart, as after a crash: the kernel neither unmaps nor resets anything before the machine resets.
    let job = three_boots("echo b >/proc/sysrq-trigger; sleep 60");
    let guest = guest_with_windows("reset-parks").job(&job);

    let outcome = run(&guest);

    workload::check_verified(&outcome, 3).unwrap_or_else(|error| panic!("{error:#}"));
    // The VMM reports its counters before each reset and at the end.
    let [first, second, .., last] = &outcome.counters[..] else {
        panic!("expected at least three reports: {:?}", outcome.counters)
    };
    assert!(first.requests.window_add >= 1 && first.unparked_chunks == 0, "{first:?}");
    assert!(second.unparked_chunks >= 1, "the second kernel did not take over the first one's chunks: {second:?}");
    assert!(last.unparked_chunks > second.unparked_chunks, "the last kernel did not take over chunks: {last:?}");
    assert!(last.window_bytes <= 64 * MIB, "{last:?}");
}

#[guest_test]
fn driver_is_unbound_and_rebound_under_windows() {
    const ROUNDS: usize = 4;
    let verify = workload::fio_verify(8, 32);
    let job = format!(
        r#"{WAIT_FOR_NVME}
for round in $(seq {ROUNDS}); do
{verify}
    echo "$NVME" >/sys/bus/pci/drivers/nvme/unbind
    [ ! -e /dev/nvme0n1 ] || exit 80
    echo "$NVME" >/sys/bus/pci/drivers/nvme/bind
    wait_for_nvme
done
"#
    );
    let guest = guest_with_windows("rebind-bounce").job(&job);

    let outcome = run(&guest);

    workload::check_verified(&outcome, ROUNDS).unwrap_or_else(|error| panic!("{error:#}"));
}

#[guest_test]
fn device_taken_out_of_its_domain_and_back_under_windows() {
    // VFIO in the guest replaces the drive's DMA domain. The window ends with the domain (protocol, rule 2). When the drive
    // returns, it gets a new window.
    const ROUNDS: usize = 3;
    let verify = workload::fio_verify(8, 32);
    let job = format!(
        r#"{WAIT_FOR_NVME}
DEVICE=/sys/bus/pci/devices/$NVME
echo 1 >/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts
for round in $(seq {ROUNDS}); do
{verify}
    echo "$NVME" >"$DEVICE/driver/unbind"
    echo vfio-pci >"$DEVICE/driver_override"
    echo "$NVME" >/sys/bus/pci/drivers_probe
    # edu-dma opens the group, which moves the drive to VFIO's domain, and maps one page there.
    printf 'map 0x100000 rw\nunmap 0x100000\n' | edu-dma vfio "$NVME" || exit 82
    echo "$NVME" >"$DEVICE/driver/unbind"
    echo >"$DEVICE/driver_override"
    echo "$NVME" >/sys/bus/pci/drivers_probe
    wait_for_nvme
done
{verify}
"#
    );
    let program = std::fs::read(SITE.edu_dma.as_ref().expect("CAROM_EDU_DMA is set")).unwrap();
    let guest = guest_with_windows("domain-switch-bounce").program("edu-dma", program).job(&job);

    let outcome = run(&guest);

    workload::check_verified(&outcome, ROUNDS + 1).unwrap_or_else(|error| panic!("{error:#}"));
    let taken = outcome.values("CAROM-EDU").filter(|result| *result == "map 0x100000 rw ok").count();
    assert_eq!(taken, ROUNDS, "console:\n{}", outcome.console);
    let counters = outcome.counters.last().expect("the VMM reports its counters");
    assert!(counters.requests.window_add > ROUNDS as u64, "not every domain grew a window: {counters:?}");
    assert!(counters.window_bytes <= 64 * MIB, "{counters:?}");
}

/// Shell function `refuse DEVICE`: unbinds a device from its driver, requests an identity domain for the device's group, and
/// binds the device again.
const REFUSE: &str = r#"
refuse() {
    group=$(readlink -f "/sys/bus/pci/devices/$1/iommu_group")
    echo "$1" >"/sys/bus/pci/devices/$1/driver/unbind"
    echo identity >"$group/type" || echo CAROM-REFUSED
    echo "CAROM-TYPE $(cat "$group/type")"
    echo "$1" >/sys/bus/pci/drivers_probe
}
"#;

/// Runs a guest whose VMM may lock less memory than the guest's RAM, so the VMM rejects identity domains. Checks that `domains`
/// requests were rejected, that I/O was verified three times, and that the kernel does not complain.
fn refused(guest: &Guest, domains: usize) -> Outcome {
    let outcome = run(guest);

    workload::check_verified(&outcome, 3).unwrap_or_else(|error| panic!("{error:#}"));
    assert_eq!(outcome.console.matches("CAROM-REFUSED").count(), domains, "console:\n{}", outcome.console);
    assert_eq!(outcome.values("CAROM-TYPE").collect::<Vec<_>>(), vec!["DMA"; domains]);
    let counters = outcome.counters.last().expect("the VMM reports its counters");
    assert!(counters.failed.attach >= domains as u64, "{counters:?}");
    assert_no_complaint(&outcome);
    outcome
}

/// Checks that the drive returns to its previous domain, with working mappings and windows.
fn refused_domain_leaves_the_old_one(name: &str, kernel: Kernel) {
    let job = format!(
        r#"{WAIT_FOR_NVME}{REFUSE}
{verify}
for round in 1 2; do
    refuse "$NVME"
    wait_for_nvme
{verify}
    echo "CAROM-CHUNKS $(awk '/^chunks / {{ n += $2 }} END {{ print n + 0 }}' /sys/kernel/debug/iommu_bounce/*/stats)"
done
{COMPLAINTS}"#,
        verify = workload::fio_verify(8, 32)
    );
    let guest = guest_with_windows(name).kernel(kernel).locked_memory(256 * MIB).job(&job);

    let outcome = refused(&guest, 2);

    // Each request for another domain ended the windows. Afterwards, the guest requested new chunks.
    let chunks: Vec<_> = outcome.values("CAROM-CHUNKS").collect();
    assert!(
        chunks.len() == 2 && chunks.iter().all(|count| *count != "0"),
        "the windows did not get chunks again each time: {chunks:?}"
    );
}

#[guest_test]
fn refused_domain_leaves_the_old_domain_to_the_device() {
    refused_domain_leaves_the_old_one("refused", Kernel::Patched);
}

#[guest_test(slow = "the same test runs on the older kernel, which has the same hook")]
fn refused_domain_leaves_the_old_domain_on_the_newer_kernel() {
    refused_domain_leaves_the_old_one("refused-newer", Kernel::Newer);
}

/// Checks that two devices work in their previous domains after the VMM has rejected other domains. The guest has no windows.
///
/// The drive bounces through guest pages. The drive's pool unmaps these pages before the VMM receives the ATTACH request for the identity
/// domain. For the edu device, the test driver leaves a page mapped. The device reads and writes this page each time the driver
/// is bound.
fn refused_domain_leaves_what_is_mapped(name: &str, kernel: Kernel) {
    let edu = required(SITE.edu.as_ref(), "QEMU's edu device (CAROM_EDU)");
    let job = format!(
        r#"{WAIT_FOR_NVME}{REFUSE}{FIND_EDU}{TEST_EDU}
POOL=$(grep -lx "device $NVME" /sys/kernel/debug/iommu_bounce/*/stats)
works() {{
{verify}
    sed -n 's/^provider /CAROM-PROVIDER /p; s/^chunks /CAROM-CHUNKS /p' "$POOL"
    awk '/^bounced_/ {{ n += $2 }} END {{ print "CAROM-BOUNCED", n + 0 }}' "$POOL"
}}
works
for round in 1 2; do
    refuse "$EDU"
    refuse "$NVME"
    wait_for_nvme
    works
done
dmesg | sed -n 's/^.*dma-bounce-test: a page is mapped at /CAROM-PAGE /p'
{COMPLAINTS}"#,
        verify = workload::fio_verify(8, 32)
    );
    let guest = Guest::new(name)
        .kernel(kernel)
        .iommu_device(edu)
        .iommu_device(&SITE.nvme[0])
        .cmdline("iommu.strict=1 iommu.bounce=auto dma_bounce_test.leave=1")
        .locked_memory(256 * MIB)
        .time_limit(Duration::from_secs(150))
        .job(&job);

    let outcome = refused(&guest, 4);

    let pages: Vec<&str> = outcome.values("CAROM-PAGE").collect();
    assert!(pages.len() == 3 && pages.iter().all(|page| *page == pages[0]), "{pages:?}; {}", outcome.console);
    // No MAP request failed, so the guest never mapped an address that was still mapped.
    let counters = outcome.counters.last().expect("the VMM reports its counters");
    assert_eq!((counters.failed.maps(), counters.requests.window_add), (0, 0), "{counters:?}");
    assert_eq!(outcome.values("CAROM-PROVIDER").collect::<Vec<_>>(), ["pages"; 3]);
    assert!(outcome.values("CAROM-CHUNKS").all(|count| count != "0"), "console:\n{}", outcome.console);
    let bounced: Vec<u64> = outcome.values("CAROM-BOUNCED").map(|count| count.parse().unwrap()).collect();
    assert!(
        bounced.len() == 3 && bounced.windows(2).all(|two| two[1] > two[0] + 100),
        "not every job bounced: {bounced:?}"
    );
}

#[guest_test(needs(Edu))]
fn refused_domain_keeps_the_devices_mappings() {
    refused_domain_leaves_what_is_mapped("refused-pages", Kernel::Patched);
}

#[guest_test(needs(Edu), slow = "the same test runs on the older kernel, which has the same hook")]
fn refused_domain_keeps_mappings_on_the_newer_kernel() {
    refused_domain_leaves_what_is_mapped("refused-pages-newer", Kernel::Newer);
}

#[guest_test]
fn ended_guest_leaves_the_device_to_the_next() {
    for round in 0..2 {
        let guest = Guest::new(&format!("again-{round}"))
            .iommu_device(&SITE.nvme[0])
            .job(&format!("{WAIT_FOR_NVME}\necho \"CAROM-SECTORS $(blockdev --getsz /dev/nvme0n1)\"\n"));
        assert!(number(&run(&guest), "CAROM-SECTORS") > 0);
    }
}

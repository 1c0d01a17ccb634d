// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Window memory that applications use as buffers, for direct I/O without copies and without mappings.

use carom_integration::harness::guest_test;
use carom_integration::workload::{self, WAIT_FOR_NVME};
use carom_integration::{Guest, Kernel, Outcome};

use crate::support::{COMPLAINTS, MIB, SITE, assert_no_complaint, guest_with_windows, number, run};

/// Shell functions. `lent ENGINE` makes fio write and verify the drive, with buffers in lent memory. fio removes the file that
/// it maps, so the function gives fio a symbolic link to the device file. `figures NAME` prints the pool's counters as lines
/// `CAROM-STAT-NAME-<key> <value>`, and makes the VMM report its counters.
const FUNCTIONS: &str = r#"
lent() {
    ln -s "/dev/iommu_bounce/$NVME" /tmp/lent
    fio --name=verify --filename=/dev/nvme0n1 --direct=1 --rw=randwrite --iodepth=16 --mem=mmapshared:/tmp/lent \
        --bssplit=4k/35:12k/10:16k/15:64k/20:128k/20 --size=8M --verify=crc32c --do_verify=1 --verify_fatal=1 --verify_dump=0 \
        --ioengine="$@" --output-format=terse --terse-version=3 >/tmp/verify 2>&1
    status=$?
    [ $status = 0 ] || cat /tmp/verify
    echo "CAROM-VERIFY $status $(awk -F';' '/^3;/ { print $6 * 1024 }' /tmp/verify)"
}
figures() {
    sed "s/^/CAROM-STAT-$1-/" /sys/kernel/debug/iommu_bounce/*/stats
    echo "CAROM-MARK $1"
    sleep 0.5
}
"#;

fn guest(name: &str, kernel: Kernel, work: &str) -> Guest {
    guest_with_windows(name).kernel(kernel).job(&format!("{WAIT_FOR_NVME}{FUNCTIONS}{work}{COMPLAINTS}"))
}

/// Returns how much a counter of the guest grew from the report `before` to the report `after`.
fn grown(outcome: &Outcome, key: &str, before: &str, after: &str) -> u64 {
    number(outcome, &format!("CAROM-STAT-{after}-{key}")) - number(outcome, &format!("CAROM-STAT-{before}-{key}"))
}

fn buffers_in_lent_memory(kernel: Kernel) {
    let work = format!(
        "{}\nfigures plain\nlent libaio\nlent io_uring --fixedbufs=1\nfigures lent\nsleep 20\nfigures end\n",
        workload::fio_verify(4, 16)
    );

    let outcome = run(&guest("lent", kernel, &work));

    workload::check_verified(&outcome, 3).unwrap_or_else(|error| panic!("{error:#}"));
    assert_no_complaint(&outcome);
    let [plain, lent, end] = outcome.counters[..3] else {
        panic!("expected reports for three marks: {:?}", outcome.counters)
    };
    let buffers = grown(&outcome, "lent_buffers", "plain", "lent");
    // Each of the two runs writes and reads 8 MiB, in buffers of less than 48 KiB on average.
    assert!(buffers > 600, "{buffers} buffers; console:\n{}", outcome.console);
    let maps = lent.requests.maps() - plain.requests.maps();
    assert!(maps < buffers / 20, "{maps} MAPs for {buffers} buffers");
    for key in ["bytes_in", "bytes_out"] {
        let copied = grown(&outcome, key, "plain", "lent");
        assert!(copied < MIB, "{key}: {copied} bytes were copied, more than the kernel itself reads");
    }
    // The lent memory has been returned, so the windows are no larger than before.
    assert!(end.window_bytes <= plain.window_bytes, "{plain:?} {end:?}");
}

#[guest_test]
fn direct_io_of_lent_memory_is_neither_copied_nor_mapped() {
    buffers_in_lent_memory(Kernel::Patched);
}

#[guest_test]
fn io_of_lent_memory_is_not_copied_nor_mapped_on_newer_kernel() {
    buffers_in_lent_memory(Kernel::Newer);
}

/// Shell function that runs `lent-check` and prints its results.
const CHECKED: &str = r#"
checked() { lent-check "/dev/iommu_bounce/$NVME" "$1" | sed 's/^lent-check: /CAROM-CHECKED /'; }
"#;

/// Job in which `lent-check` holds lent memory while its drive is removed. The job runs all checks before the removal, and
/// after the drive has been found again.
const REMOVAL: &str = r#"
checked /dev/nvme0n1
lent-check "/dev/iommu_bounce/$NVME" >/tmp/holder & holder=$!
until grep -q holds /tmp/holder; do sleep 0.1; done
echo 1 >"/sys/bus/pci/devices/$NVME/remove"
wait $holder
echo "CAROM-TAKEN $?"
[ ! -e "/dev/iommu_bounce/$NVME" ] || exit 95
echo 1 >/sys/bus/pci/rescan
wait_for_nvme
checked /dev/nvme0n1
"#;

/// Job that removes a drive while an io_uring holds memory that the drive lent. The removal must not wait for the program that holds the
/// memory. While the memory is held, the drive is found again and lends other memory.
const HELD: &str = r#"
lent-check "/dev/iommu_bounce/$NVME" + >/tmp/held & held=$!
until grep -q registered /tmp/held; do kill -0 $held || exit 93; sleep 0.1; done
echo 1 >"/sys/bus/pci/devices/$NVME/remove"
kill -0 $held && echo "CAROM-STILL-HELD 1"
echo 1 >/sys/bus/pci/rescan
wait_for_nvme
checked /dev/nvme0n1
figures held
kill $held
wait $held
checked /dev/nvme0n1
"#;

/// Job in which `lent-check` keeps the drive's file open while the drive gets another domain. Then the kernel must refuse to
/// map the file.
const REPLACED: &str = r#"
mkfifo /tmp/go
lent-check "/dev/iommu_bounce/$NVME" - </tmp/go >/tmp/opened & opened=$!
exec 3>/tmp/go
until grep -q waits /tmp/opened; do sleep 0.1; done
echo "$NVME" >/sys/bus/pci/drivers/nvme/unbind
for type in identity DMA; do echo $type >"/sys/bus/pci/devices/$NVME/iommu_group/type" || exit 94; done
echo "$NVME" >/sys/bus/pci/drivers/nvme/bind
wait_for_nvme
dd if=/dev/nvme0n1 of=/dev/null bs=64k count=64 iflag=direct 2>/dev/null
echo >&3
exec 3>&-
wait $opened
grep refused /tmp/opened | sed 's/^lent-check: /CAROM-CHECKED /'
"#;

/// Number of checks that `lent-check` makes with a file and a drive.
const CASES: usize = 15;

fn assert_checked(outcome: &Outcome, cases: usize) {
    let checked: Vec<&str> = outcome.values("CAROM-CHECKED").collect();
    assert_eq!(checked.len(), cases, "{checked:?}");
    assert!(checked.iter().all(|case| case.ends_with(": right")), "{checked:?}");
}

fn lent_memory(kernel: Kernel) {
    let outcome = run(&guest("lent-check", kernel, &format!("{CHECKED}{REPLACED}{REMOVAL}")));

    assert_no_complaint(&outcome);
    assert_eq!(
        number(&outcome, "CAROM-TAKEN"),
        0,
        "the process with lent memory did not end by SIGBUS; console:\n{}",
        outcome.console
    );
    assert_checked(&outcome, 2 * CASES + 1);
}

#[guest_test]
fn lent_memory_is_right_in_each_case_and_ends_with_its_drive() {
    lent_memory(Kernel::Patched);
}

#[guest_test]
fn lent_memory_works_and_ends_with_its_drive_on_newer_kernel() {
    lent_memory(Kernel::Newer);
}

fn held_memory(kernel: Kernel) {
    let outcome = run(&guest("lent-held", kernel, &format!("{CHECKED}{HELD}")));

    assert_no_complaint(&outcome);
    assert_eq!(number(&outcome, "CAROM-STILL-HELD"), 1);
    assert_checked(&outcome, 2 * CASES);
}

#[guest_test]
fn removal_of_drive_does_not_wait_for_holder_of_lent_memory() {
    held_memory(Kernel::Patched);
}

#[guest_test]
fn removal_of_drive_does_not_wait_for_holder_of_lent_memory_on_newer_kernel() {
    held_memory(Kernel::Newer);
}

/// Job that asks two drives for lent memory: less than half of the windows' memory from each, but more than half from both together.
const BOTH: &str = r#"
until [ -b /dev/nvme1n1 ]; do sleep 0.1; done
amount() { # DRIVE NAME
    mkfifo /tmp/in-$2
    lent-check "/dev/iommu_bounce/$(basename "$(readlink -f /sys/class/nvme/$1/device)")" =20 </tmp/in-$2 >/tmp/out-$2 &
}
dd if=/dev/nvme1n1 of=/dev/null bs=4k count=64 iflag=direct 2>/dev/null
amount nvme0 first
exec 3>/tmp/in-first
until grep -q : /tmp/out-first; do sleep 0.1; done
amount nvme1 second
exec 4>/tmp/in-second
until grep -q : /tmp/out-second; do sleep 0.1; done
sed 's/^lent-check: /CAROM-AMOUNT /' /tmp/out-first /tmp/out-second
echo >&3
echo >&4
wait
"#;

#[guest_test]
fn half_of_the_windows_is_the_limit_of_all_drives_together() {
    let guest = guest("lent-both", Kernel::Patched, BOTH).iommu_device(&SITE.nvme[1]);

    let outcome = run(&guest);

    assert_no_complaint(&outcome);
    assert_eq!(outcome.values("CAROM-AMOUNT").collect::<Vec<_>>(), ["mapped", "refused"], "{}", outcome.console);
}

/// Job that uses memory lent for one drive as buffers for another drive. The kernel copies the other drive's data.
const ANOTHER: &str = r#"
until [ -b /dev/nvme1n1 ]; do sleep 0.1; done
figures before
checked /dev/nvme1n1
figures after
"#;

fn lent_memory_of_another_drive(kernel: Kernel) {
    let guest = guest("lent-another", kernel, &format!("{CHECKED}{ANOTHER}")).iommu_device(&SITE.nvme[1]);

    let outcome = run(&guest);

    assert_no_complaint(&outcome);
    assert_checked(&outcome, CASES);
    let [before, after] = outcome.counters[..2] else {
        panic!("expected reports for two marks: {:?}", outcome.counters)
    };
    // The VMM would reject a mapping of this memory, because it is not RAM.
    assert_eq!(after.failed.maps(), before.failed.maps(), "{after:?}");
}

#[guest_test]
fn lent_memory_is_right_with_another_drive() {
    lent_memory_of_another_drive(Kernel::Patched);
}

#[guest_test]
fn lent_memory_is_right_with_another_drive_on_the_newer_kernel() {
    lent_memory_of_another_drive(Kernel::Newer);
}

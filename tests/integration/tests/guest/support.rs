// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Common helpers of the tests.

pub(crate) mod block_device;
pub(crate) mod debian;
pub(crate) mod driven;
pub(crate) mod edu;
pub(crate) mod edu_server;
pub(crate) mod failing_allocations;
pub(crate) mod host_memory;
pub(crate) mod qemu_img;
pub(crate) mod repository;
pub(crate) mod server;
pub(crate) mod systemd;
pub(crate) mod tap;

use std::sync::LazyLock;

use carom_integration::{Guest, Outcome, Site};

/// Programs, kernels and devices for the tests. A test that uses them panics if they are missing.
pub(crate) static SITE: LazyLock<Site> = LazyLock::new(|| Site::from_env().expect("scripts/test sets up the site"));

/// Returns a guest in strict mode, with windows of 64 MiB for the first drive.
pub(crate) fn guest_with_windows(name: &str) -> Guest {
    Guest::new(name).iommu_device(&SITE.nvme[0]).bounce("size=64M").cmdline("iommu.strict=1")
}

/// Runs a guest whose job must end with status 0.
pub(crate) fn run(guest: &Guest) -> Outcome {
    let outcome = guest.run(&SITE).unwrap_or_else(|error| panic!("{error:#}"));
    assert_eq!(outcome.job_status, 0, "the job failed; console:\n{}", outcome.console);
    outcome
}

/// Returns the number in the console's last line `KEY NUMBER`. The number is decimal or begins with `0x`.
pub(crate) fn number(outcome: &Outcome, key: &str) -> u64 {
    let text = outcome.value(key).unwrap_or_else(|error| panic!("{error:#}"));
    let parsed = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    parsed.unwrap_or_else(|_| panic!("{key}: {text:?} is not a number; console:\n{}", outcome.console))
}

/// Shell lines that print the warnings in the kernel's log, and their number. They leave out a warning about the rig's emulated
/// CPU (`fpu__init`).
pub(crate) const COMPLAINTS: &str = "
dmesg | grep -E 'WARNING:|BUG:|KASAN|possible (recursive|circular) locking|DMA-API: ' | grep -v fpu__init >/tmp/complaints
cat /tmp/complaints
echo \"CAROM-COMPLAINTS $(wc -l </tmp/complaints)\"
";

/// Shell function `rebind_under_load DEVICE`: unbinds the NVMe drive of a PCI device while reads are in flight, and binds it
/// again. The job must define `drive_of`, which prints the drive's name.
pub(crate) const REBIND_UNDER_LOAD: &str = r#"
rebind_under_load() {
    fio --name=load --filename="/dev/$(drive_of "$1")" --direct=1 --rw=randread --ioengine=libaio --iodepth=16 --bs=16k \
        --size=16M --time_based --runtime=60 >/tmp/load 2>&1 &
    LOAD=$!
    sleep 1
    echo "$1" >/sys/bus/pci/drivers/nvme/unbind
    # fio may treat the end of the drive like the end of a file, and continue to read.
    kill $LOAD
    wait $LOAD
    echo "$1" >/sys/bus/pci/drivers/nvme/bind
}
"#;

/// Asserts that the guest's kernel printed no warning. The job must contain [`COMPLAINTS`].
pub(crate) fn assert_no_complaint(outcome: &Outcome) {
    assert_eq!(number(outcome, "CAROM-COMPLAINTS"), 0, "console:\n{}", outcome.console);
}

/// Returns the value `what` of the site, such as a device's address. Panics if the site lacks the value.
pub(crate) fn required<'site>(what: Option<&'site String>, name: &str) -> &'site str {
    what.unwrap_or_else(|| panic!("this test needs {name}"))
}

/// Number of bytes in a MiB.
pub(crate) const MIB: u64 = 1 << 20;

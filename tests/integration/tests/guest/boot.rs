// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Boot of kernels in both formats (bzImage and ELF), with one and two vCPUs, and with memory below and above the PCI hole.

use carom_integration::harness::guest_test;
use carom_integration::{Guest, Kernel};

use crate::support::{number, run};

/// Job that prints the number of CPUs and the size of the memory. Then the job keeps all CPUs busy for a while, and prints the
/// number of CPUs that have received timer interrupts.
const LOOK: &str = r#"
echo "CAROM-CPUS $(nproc)"
echo "CAROM-MEMORY-KIB $(awk '/^MemTotal:/ { print $2 }' /proc/meminfo)"
for cpu in $(seq "$(nproc)"); do
    (i=0; while [ $i -lt 20000 ]; do i=$((i + 1)); done; echo "CAROM-WORKED $cpu") &
done
wait
echo "CAROM-TIMER-CPUS $(awk '/^ *LOC:/ { n = 0; for (i = 2; i <= NF && $i ~ /^[0-9]+$/; i++) n += $i > 0; print n }' /proc/interrupts)"
"#;

fn boots(name: &str, kernel: Kernel, cpus: u8, memory_mib: u32) {
    let guest = Guest::new(name).kernel(kernel).cpus(cpus).memory_mib(memory_mib).job(LOOK);

    let outcome = run(&guest);

    let cpus = u64::from(cpus);
    assert_eq!(number(&outcome, "CAROM-CPUS"), cpus);
    assert_eq!(number(&outcome, "CAROM-TIMER-CPUS"), cpus, "CPUs without timer interrupts");
    assert_eq!(outcome.values("CAROM-WORKED").count() as u64, cpus);
    let kib = number(&outcome, "CAROM-MEMORY-KIB");
    let given = u64::from(memory_mib) * 1024;
    assert!(kib < given && kib > given * 85 / 100, "the guest has {kib} KiB of {given} KiB");
    assert!(outcome.events.iter().any(|event| event.source == "vm" && event.event == "shutdown"));
}

#[guest_test(slow = "most tests start such a guest, and the test with two vCPUs makes the same checks")]
fn bzimage_on_one_vcpu() {
    boots("boot-bzimage-1", Kernel::Patched, 1, 512);
}

#[guest_test]
fn bzimage_on_two_vcpus() {
    boots("boot-bzimage-2", Kernel::Patched, 2, 512);
}

#[guest_test(slow = "elf_on_two_vcpus covers the same and more")]
fn elf_on_one_vcpu() {
    boots("boot-elf-1", Kernel::PatchedElf, 1, 512);
}

#[guest_test]
fn elf_on_two_vcpus() {
    boots("boot-elf-2", Kernel::PatchedElf, 2, 512);
}

#[guest_test]
fn memory_above_the_pci_hole_is_usable() {
    // The guest has 3.25 GiB of RAM. The PCI hole begins at 3 GiB, so the last 256 MiB of RAM have addresses above 4 GiB. The
    // host allocates only the pages that the guest touches, so the test needs less memory.
    let job = format!(
        "{LOOK}\necho \"CAROM-HIGH $(awk '/System RAM/ {{ split($1, r, \"-\"); if (length(r[1]) > 8) print \"0x\" r[1] }}' /proc/iomem)\"\n"
    );
    let guest = Guest::new("boot-high-memory").memory_mib(3328).job(&job);

    let outcome = run(&guest);

    assert_eq!(number(&outcome, "CAROM-HIGH"), 4 << 30);
    assert!(number(&outcome, "CAROM-MEMORY-KIB") > 3 << 20);
}

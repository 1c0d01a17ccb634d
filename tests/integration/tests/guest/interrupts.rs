// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Bytes that the guest's kernel copies with interrupts off when a drive's reads bounce. The trace events of the guest's kernel
//! contain the sizes of the copies.

use carom_integration::Kernel;
use carom_integration::harness::{guest_test, tell};
use carom_integration::workload::{self, WAIT_FOR_NVME};

use crate::support::{COMPLAINTS, assert_no_complaint, guest_with_windows, number, run};

/// Maximum number of bytes that one interrupt copies. This limit is from the patch `nvme-pci: Bound what is copied with
/// interrupts off`.
const MOST_COPIED: u64 = 256 << 10;

/// Job that writes and verifies the drive, so that the pool gets its chunks. Then the job verifies the drive again while the
/// kernel traces events. These reads have 128 KiB each, and 64 reads are in flight.
const JOB: &str = r#"
verified() {
    fio --name=verify --filename=/dev/nvme0n1 --direct=1 --rw=write --ioengine=libaio --iodepth=64 --bs=128k --size=32M \
        --verify=crc32c --do_verify=1 --verify_fatal=1 --verify_dump=0 "$@" --output-format=terse --terse-version=3 >/tmp/verify 2>&1
    status=$?
    [ $status = 0 ] || cat /tmp/verify
    echo "CAROM-VERIFY $status $(awk -F';' '/^3;/ { print $6 * 1024 }' /tmp/verify)"
}
verified
cd /sys/kernel/tracing || exit 95
echo 4096 >buffer_size_kb
for event in dma_bounce/dma_bounce_unmap irq/irq_handler_entry irq/irq_handler_exit; do
    echo 1 >events/$event/enable || exit 95
done
verified --verify_only
echo 0 >tracing_on
"#;

/// Job that prints the time in µs and the copied bytes of each interrupt of the drive's I/O queues. Then it prints how many buffers
/// were copied in interrupts, in softirqs and elsewhere.
///
/// A line of the trace is `COMM-PID [CPU] FLAGS TIME: EVENT: …`. The third flag is the kernel's context: `h` for an interrupt,
/// `H` for an interrupt during a softirq, `s` for a softirq.
const READ_TRACE: &str = r#"
awk '
match($0, /\[[0-9]+\] /) {
    split(substr($0, RSTART + RLENGTH), word, " ")
    where = substr(word[1], 3, 1)
    us = word[2] * 1000000
    if (word[3] == "irq_handler_entry:") {
        inside = /name=nvme0q[1-9]/
        start = us
        bytes = 0
    } else if (word[3] == "irq_handler_exit:") {
        if (inside) print "CAROM-INTERRUPT", int(us - start + 0.5), bytes
        inside = 0
    } else if (word[3] == "dma_bounce_unmap:" && / copy=1/) {
        match($0, / len=[0-9]+/)
        if (where ~ /[hH]/) { interrupts++; bytes += substr($0, RSTART + 5, RLENGTH - 5) }
        else if (where == "s") softirqs++
        else elsewhere++
    }
}
END {
    print "CAROM-IN-INTERRUPTS", interrupts + 0
    print "CAROM-IN-SOFTIRQS", softirqs + 0
    print "CAROM-ELSEWHERE", elsewhere + 0
}' trace
"#;

/// Numbers of buffers that were copied back after reads, by the context of the copy.
struct Copies {
    in_interrupts: u64,
    in_softirqs: u64,
    elsewhere: u64,
    /// Maximum number of bytes that one interrupt copied.
    most: u64,
}

/// Runs verified I/O in a guest with one CPU, and returns the numbers of copies.
fn copies(name: &str, kernel: Kernel, parameters: &str) -> Copies {
    let guest = guest_with_windows(name)
        .kernel(kernel)
        .cmdline(parameters)
        .job(&format!("{WAIT_FOR_NVME}{JOB}{READ_TRACE}{COMPLAINTS}"));

    let outcome = run(&guest);

    workload::check_verified(&outcome, 2).unwrap_or_else(|error| panic!("{error:#}"));
    assert_no_complaint(&outcome);
    let numbers = |line: &str| -> Option<(u64, u64)> {
        let (us, bytes) = line.split_once(' ')?;
        Some((us.parse().ok()?, bytes.parse().ok()?))
    };
    let interrupts: Option<Vec<(u64, u64)>> = outcome.values("CAROM-INTERRUPT").map(numbers).collect();
    let interrupts = interrupts.expect("two numbers per line");
    let Some(&(its_time, most)) = interrupts.iter().max_by_key(|(_, bytes)| bytes) else {
        panic!("no interrupt was traced; console:\n{}", outcome.console)
    };
    let mut times: Vec<u64> = interrupts.into_iter().map(|(us, _)| us).collect();
    times.sort_unstable();
    let [in_interrupts, in_softirqs, elsewhere] =
        ["CAROM-IN-INTERRUPTS", "CAROM-IN-SOFTIRQS", "CAROM-ELSEWHERE"].map(|key| number(&outcome, key));
    tell(&format!(
        "{name}: {} interrupts, at most {} µs, median {} µs; the interrupt that copied most copied {} KiB in {its_time} µs; \
         buffers were copied {in_interrupts} times in interrupts, {in_softirqs} in softirqs, {elsewhere} elsewhere",
        times.len(),
        times[times.len() - 1],
        times[times.len() / 2],
        most >> 10
    ));
    Copies { in_interrupts, in_softirqs, elsewhere, most }
}

fn bounded(name: &str, kernel: Kernel) {
    let copies = copies(name, kernel, "");

    assert!(copies.in_interrupts > 0, "nothing was copied in interrupts, so their bound was not tested");
    assert!(copies.most <= MOST_COPIED, "an interrupt copied {} bytes", copies.most);
    assert!(copies.in_softirqs > 0, "no interrupt found more than it may copy");
}

#[guest_test(needs(TracePoints))]
fn interrupt_leaves_excess_copies_to_a_softirq() {
    bounded("interrupts", Kernel::Profile);
}

#[guest_test(needs(NewerTracePoints))]
fn interrupt_leaves_excess_copies_to_a_softirq_on_newer_kernel() {
    bounded("interrupts-newer", Kernel::NewerProfile);
}

fn copied_by_a_thread(name: &str, kernel: Kernel) {
    let copies = copies(name, kernel, "nvme.use_threaded_interrupts=1");

    assert_eq!(copies.in_interrupts + copies.in_softirqs, 0, "an interrupt copied {} bytes", copies.most);
    assert!(copies.elsewhere > 0, "nothing was copied");
}

#[guest_test(needs(TracePoints))]
fn threaded_interrupt_copies_nothing() {
    copied_by_a_thread("interrupts-threaded", Kernel::Profile);
}

#[guest_test(needs(NewerTracePoints))]
fn threaded_interrupt_copies_nothing_on_the_newer_kernel() {
    copied_by_a_thread("interrupts-threaded-newer", Kernel::NewerProfile);
}

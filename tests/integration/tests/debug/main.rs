// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests of the guest patch in a debug kernel: KASAN, lockdep, DMA API debugging, kmemleak, and injected allocation failures.
//! `scripts/test debug` builds this kernel and runs the tests. Each test takes minutes, so a plain `scripts/test` does not run
//! them.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::fs::File;
use std::process::ExitCode;
use std::sync::LazyLock;
use std::thread;
use std::time::{Duration, Instant};

use carom_integration::api::ApiVmm;
use carom_integration::devices::{self, Peer, card_job, drive_job, echo_server};
use carom_integration::harness::{self, guest_test};
use carom_integration::workload::{self, WAIT_FOR_NVME};
use carom_integration::{Guest, Kernel, Outcome, Site, kunit};
use serde_json::{Value, json};

static SITE: LazyLock<Site> = LazyLock::new(|| Site::from_env().expect("scripts/test sets up the site"));

/// Time limit of a guest. KASAN and lockdep make a guest in the emulated machine ten times slower. The longest guest took
/// 350 s on a busy host.
const TIME_LIMIT: Duration = Duration::from_secs(600);

/// Shell functions. `reports` prints kmemleak's reports, the kernel's warnings, and the total number of printed lines.
const FUNCTIONS: &str = r#"
POOLS=/sys/kernel/debug/iommu_bounce
reports() {
    # kmemleak ignores memory younger than 5 s, and reports a leak only after a second scan.
    sleep 6
    echo scan >/sys/kernel/debug/kmemleak
    sleep 1
    echo scan >/sys/kernel/debug/kmemleak
    {
        cat /sys/kernel/debug/kmemleak
        dmesg | grep -E 'WARNING:|BUG:|KASAN|possible (recursive|circular|irq)|inconsistent lock|suspicious RCU|DMA-API: |ODEBUG' |
            grep -vE "fpu__init|DMA-API: (preallocated|debugging enabled)${KNOWN:+|$KNOWN}"
    } >/tmp/reports
    sed 's/^/CAROM-REPORT /' /tmp/reports
    echo "CAROM-REPORTS $(wc -l </tmp/reports)"
}
# Prints the number of mapped slots of all pools: a pool's slots minus its free slots.
mapped_slots() {
    awk '/^slots_(read|write|rw)_/ { n += $2 } /^free_/ { n -= $2 } END { print n + 0 }' $POOLS/*/stats
}
# Waits at most 30 s until the pools have returned all chunks. Prints the mapped slots, the remaining chunks and some counters.
# A slot that is never freed keeps its chunk.
settle() {
    for pool in $POOLS/*; do echo 100 >"$pool/idle_ms"; done
    i=0
    while [ "$(awk '/^chunks / { n += $2 } END { print n }' $POOLS/*/stats)" != 0 ] && [ $i -lt 150 ]; do
        i=$((i + 1))
        sleep 0.2
    done
    echo "CAROM-MAPPED $(mapped_slots)"
    echo "CAROM-CHUNKS $(awk '/^chunks / { n += $2 } END { print n }' $POOLS/*/stats)"
    awk '/^(chunk_adds|chunk_failures|chunks_shrunk|chunks_drained|slots_orphaned|fallback_full|bounced_[a-z]*) / { n[$1] += $2 }
        END { for (key in n) print "CAROM-SUM-" key, n[key] }' $POOLS/*/stats
}
# Moves the drive, which has no driver, out of its domain to VFIO, and back.
lend_to_vfio() {
    echo 1 >/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts
    echo vfio-pci >"/sys/bus/pci/devices/$NVME/driver_override"
    echo "$NVME" >/sys/bus/pci/drivers_probe
    vfio-claim "$(basename "$(readlink "/sys/bus/pci/devices/$NVME/iommu_group")")" || exit 93
    echo "$NVME" >/sys/bus/pci/drivers/vfio-pci/unbind
    echo >"/sys/bus/pci/devices/$NVME/driver_override"
}
bind_nvme() {
    echo "$NVME" >/sys/bus/pci/drivers/nvme/bind
    i=0
    while [ ! -b /dev/nvme0n1 ] && [ $i -lt 300 ]; do i=$((i + 1)); sleep 0.1; done
}
"#;

fn number(outcome: &Outcome, key: &str) -> u64 {
    let text = outcome.value(key).unwrap_or_else(|error| panic!("{error:#}"));
    text.parse().unwrap_or_else(|_| panic!("{key}: {text:?} is not a number; console:\n{}", outcome.console))
}

fn guest(name: &str, work: &str) -> Guest {
    Guest::new(name)
        .memory_mib(1024)
        .cmdline("iommu.strict=1 log_buf_len=4M rcupdate.rcu_cpu_stall_suppress=1")
        .time_limit(TIME_LIMIT)
        .job(&format!("{FUNCTIONS}{work}reports\n"))
}

fn with_drive(name: &str, work: &str) -> Guest {
    guest(name, &format!("{WAIT_FOR_NVME}{work}")).iommu_device(&SITE.nvme[0]).bounce("size=32M")
}

fn run(guest: &Guest) -> Outcome {
    let outcome = guest.run(&SITE).unwrap_or_else(|error| panic!("{error:#}"));
    assert_eq!(outcome.job_status, 0, "the job failed; console:\n{}", outcome.console);
    assert_eq!(number(&outcome, "CAROM-REPORTS"), 0, "console:\n{}", outcome.console);
    outcome
}

fn verified(outcome: &Outcome, times: usize) {
    workload::check_verified(outcome, times).unwrap_or_else(|error| panic!("{error:#}"));
}

/// Asserts that no slot of the guest's pools is mapped, and that the pools have returned all chunks.
fn settled(outcome: &Outcome) {
    assert_eq!(number(outcome, "CAROM-MAPPED"), 0, "console:\n{}", outcome.console);
    assert_eq!(number(outcome, "CAROM-CHUNKS"), 0, "console:\n{}", outcome.console);
}

#[guest_test]
fn kunit_passes() {
    let outcome = run(&kunit::on_two_nodes(guest("debug-kunit", kunit::JOB), 512));

    kunit::check(&outcome, &SITE, Kernel::Patched, &[]).unwrap_or_else(|error| panic!("{error:#}"));
}

#[guest_test]
fn io_is_verified() {
    let work = format!("{}settle\n", workload::fio_verify(8, 32));

    let outcome = run(&with_drive("debug-verify", &work).cpus(2));

    verified(&outcome, 1);
    settled(&outcome);
    assert!(number(&outcome, "CAROM-SUM-bounced_lists") + number(&outcome, "CAROM-SUM-bounced_pages") > 300);
}

/// Bytes that network cards send in large packets.
const BYTES: u64 = 1 << 19;

/// Jobs that run one after the other. Each tuple contains the device's class, the driver's name, and the job.
type Jobs<'a> = &'a [(&'a str, &'a str, String)];

/// Runs jobs of [`devices`] with bouncing for all DMA that may bounce. After each job, the device is unbound from its driver,
/// and the kernel checks that the driver has removed all its mappings.
fn drivers_keep_the_rules(guest: impl FnOnce(&str) -> Guest, jobs: Jobs<'_>) {
    // On a kernel with PREEMPT_RT, do not unbind xHCI: usb_hcd_pci_remove() calls the interrupt handler with interrupts off,
    // and such a kernel prints a warning.
    let unless = |driver: &str| if driver == "xhci_hcd" { "uname -v | grep -q PREEMPT_RT || " } else { "" };
    let unbind = |driver: &str| {
        let unless = unless(driver);
        format!("{unless}echo \"$DEVICE\" >/sys/bus/pci/drivers/{driver}/unbind || exit 95\n")
    };
    let work: String = jobs.iter().map(|(_, driver, job)| format!("{job}{}", unbind(driver))).collect();
    let guest = guest(&format!("{work}settle\n")).cpus(2).bounce("size=128M").cmdline("iommu.bounce=all");

    let outcome = run(&guest);

    let of = |wanted: &str| jobs.iter().filter(|(class, ..)| *class == wanted).count();
    verified(&outcome, of("block"));
    devices::check_same(&outcome, of("net")).unwrap_or_else(|error| panic!("{error:#}"));
    settled(&outcome);
    let figures = devices::figures(&outcome).unwrap_or_else(|error| panic!("{error:#}"));
    assert_eq!(figures.len(), jobs.len(), "console:\n{}", outcome.console);
    for ((_, driver, _), figures) in jobs.iter().zip(figures) {
        println!("{driver}: {figures}");
        // Each device transfers at least BYTES bytes. The first mappings might not bounce, because the pool has no chunk yet.
        // So the test requires only half of the bytes.
        assert!(figures.copied_in > BYTES / 2, "{driver}: {figures:?}");
    }
}

#[guest_test(needs(Net, Igb, Usb, Ahci))]
fn drivers_without_opt_in_keep_the_rules() {
    let devices = [&SITE.net, &SITE.igb, &SITE.usb, &SITE.ahci].map(|device| device.as_ref().unwrap());
    let card = |driver| ("net", driver, card_job(driver, "auto", &Peer::of_the_rig(BYTES)));
    let drive = |driver| ("block", driver, drive_job(driver, "auto", 1, 8));

    drivers_keep_the_rules(
        |work| devices.iter().fold(guest("debug-devices", work), |guest, device| guest.iommu_device(device)),
        &[card("e1000e"), card("igb"), drive("xhci_hcd"), drive("ahci")],
    );
}

#[guest_test]
fn virtio_drivers_keep_the_rules() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("disk.img");
    File::create_new(&image).unwrap().set_len(64 << 20).unwrap();
    let peer = Peer { own: "10.77.40.2", server: "10.77.40.1", port: echo_server().unwrap(), bytes: BYTES };

    let disk = format!("path={},iommu=on", image.display());
    drivers_keep_the_rules(
        |work| guest("debug-virtio", work).disk(&disk).net("ip=10.77.40.1,mac=02:00:00:00:00:40,iommu=on"),
        &[
            ("net", "virtio-pci", card_job("virtio-pci", "auto", &peer)),
            ("block", "virtio-pci", drive_job("virtio-pci", "auto", 1, 8)),
        ],
    );
}

#[guest_test]
fn trace_events_show_each_mapping() {
    let work = r#"
cd /sys/kernel/tracing || exit 94
read_some() { dd if=/dev/nvme0n1 of=/dev/null bs=4k count=32 iflag=direct; }
read_some
echo 1 >events/dma_bounce/enable
read_some
echo 0 >events/dma_bounce/enable
for event in map unmap; do echo "CAROM-TRACED-$event $(grep -c " dma_bounce_$event: " trace)"; done
"#;

    let outcome = run(&with_drive("debug-trace", work));

    for key in ["CAROM-TRACED-map", "CAROM-TRACED-unmap"] {
        assert!(number(&outcome, key) >= 32, "console:\n{}", outcome.console);
    }
}

#[guest_test]
fn lent_memory_is_right_and_taken_away_with_its_domain() {
    let work = r#"
checked() { lent-check "/dev/iommu_bounce/$NVME" /dev/nvme0n1 | sed 's/^lent-check: /CAROM-CHECKED /'; }
checked
lent-check "/dev/iommu_bounce/$NVME" >/tmp/holder & HOLDER=$!
until grep -q holds /tmp/holder; do sleep 0.1; done
echo "$NVME" >/sys/bus/pci/drivers/nvme/unbind
lend_to_vfio
wait $HOLDER
echo "CAROM-TAKEN $?"
bind_nvme
checked
settle
"#;

    let outcome = run(&with_drive("debug-lent", work).cpus(2));

    assert_eq!(
        number(&outcome, "CAROM-TAKEN"),
        0,
        "the process with lent memory did not end by SIGBUS; console:\n{}",
        outcome.console
    );
    let checked: Vec<&str> = outcome.values("CAROM-CHECKED").collect();
    assert_eq!(checked.len(), 2 * 13, "{checked:?}");
    assert!(checked.iter().all(|case| case.ends_with(": right")), "{checked:?}");
    settled(&outcome);
}

#[guest_test]
fn driver_is_unbound_and_bound_under_load() {
    // Each round unbinds the drive's driver while I/O is in flight. In every second round, VFIO also moves the drive to another
    // domain for a moment.
    let verify = workload::fio_verify(2, 16);
    let work = format!(
        r#"
for round in 1 2 3 4; do
    fio --name=load --filename=/dev/nvme0n1 --direct=1 --rw=randread --ioengine=libaio --iodepth=16 --bs=16k --size=64M \
        --time_based --runtime=60 >/tmp/load 2>&1 &
    LOAD=$!
    while slots=$(mapped_slots) && [ "$slots" = 0 ] && kill -0 $LOAD; do sleep 0.1; done
    echo "CAROM-IN-FLIGHT $slots"
    [ "$slots" != 0 ] || cat /tmp/load
    echo "$NVME" >/sys/bus/pci/drivers/nvme/unbind
    # fio may treat the end of the drive like the end of a file, and continue to read.
    kill $LOAD
    wait $LOAD
    [ $((round % 2)) != 0 ] || lend_to_vfio
    bind_nvme
    {verify}
done
settle
"#
    );

    let outcome = run(&with_drive("debug-unbind", &work));

    verified(&outcome, 4);
    settled(&outcome);
    let busy = outcome.values("CAROM-IN-FLIGHT").filter(|slots| *slots != "0").count();
    assert!(busy >= 1, "the drive was idle each time it was unbound; console:\n{}", outcome.console);
    // The pool returns its chunks when VFIO replaces the drive's domain. Afterwards, the pool adds chunks again.
    assert!(number(&outcome, "CAROM-SUM-chunk_adds") > 2, "console:\n{}", outcome.console);
}

#[guest_test]
fn memory_runs_out_while_io_runs() {
    // While chunks are added and removed, about every third slab or page allocation by the patch's functions and their callees
    // fails. The code of the patch's files is contiguous in the kernel image, from FIRST to LAST. The last of these files
    // contains dma_bounce_debugfs_del().
    let work = format!(
        r#"
FIRST=$(grep ' [tT] \(__\)\?dma_bounce_' /proc/kallsyms | sort | sed -n '1s/ .*//p')
LAST=$(sed -n 's/ [tT] dma_bounce_debugfs_del$//p' /proc/kallsyms)
for pool in $POOLS/*; do echo 20 >"$pool/idle_ms"; done
# An interrupt during such a function does unrelated work, so allocations in interrupts do not fail.
for task in /proc/[0-9]*; do echo 1 >"$task/make-it-fail" 2>/dev/null || true; done
for kind in failslab fail_page_alloc; do
    knobs=/sys/kernel/debug/$kind
    echo Y >$knobs/task-filter
    echo 0x$FIRST >$knobs/require-start
    echo 0x$LAST >$knobs/require-end
    echo N >$knobs/ignore-gfp-wait
    echo 33 >$knobs/probability
    echo 1 >$knobs/interval
    echo 1 >$knobs/verbose
    echo -1 >$knobs/times
done
echo 0 >/sys/kernel/debug/fail_page_alloc/min-order
{verify}
sleep 1
{verify}
for kind in failslab fail_page_alloc; do echo 0 >/sys/kernel/debug/$kind/probability; done
echo "CAROM-FAILED $(dmesg | grep -c 'FAULT_INJECTION: forcing a failure')"
{verify}
settle
"#,
        verify = workload::fio_verify(4, 32)
    );

    for (name, cmdline) in [("debug-memory", ""), ("debug-memory-pages", "iommu.bounce=auto")] {
        let guest = guest(name, &format!("{WAIT_FOR_NVME}{work}")).iommu_device(&SITE.nvme[0]).cmdline(cmdline);
        let outcome = run(&if cmdline.is_empty() { guest.bounce("size=32M") } else { guest });

        verified(&outcome, 3);
        settled(&outcome);
        assert!(number(&outcome, "CAROM-FAILED") > 0, "{name}: nothing failed; console:\n{}", outcome.console);
        assert!(number(&outcome, "CAROM-SUM-chunk_failures") > 0, "{name}: console:\n{}", outcome.console);
    }
}

/// Shell functions.
/// - `inject TASKS LONG PERCENT` makes PERCENT % of all allocations fail, both slabs and pages. With TASKS `Y` and LONG `N`,
///   only allocations of marked tasks fail, and none in interrupts. With `N` and `Y`, allocations of all tasks fail, but only
///   those that cannot wait for memory.
/// - `try_io TASKS LONG PERCENT` runs verified I/O three times while allocations fail, and prints the results. The process that
///   does the I/O is marked.
const INJECT: &str = r#"
inject() {
    for kind in failslab fail_page_alloc; do
        knobs=/sys/kernel/debug/$kind
        echo 0 >$knobs/probability
        echo "$1" >$knobs/task-filter
        echo "$2" >$knobs/ignore-gfp-wait
        echo 1 >$knobs/interval
        echo 1 >$knobs/verbose
        echo -1 >$knobs/times
        echo "$3" >$knobs/probability
    done
}
# fio has two processes. The process with the higher ID does the I/O.
worker() {
    set -- $(pidof fio | tr ' ' '\n' | sort -n)
    echo "$2"
}
# Runs fio three times. Prints each time its status, and the number of its lines about wrong data.
try_io() {
    before=$(failures)
    for round in 1 2 3; do
        rm -f /tmp/done /tmp/over
        { verify >/tmp/console; : >/tmp/done; } &
        verifier=$!
        until worker=$(worker); [ -n "$worker" ] || [ -e /tmp/done ]; do sleep 0.2; done
        [ -z "$worker" ] || echo 1 >"/proc/$worker/make-it-fail"
        # Bounced I/O hardly allocates memory, so other tasks must cause allocations that fail. A shell ends if it cannot start
        # a process, so this shell starts no process while allocations fail.
        for other in 1 2 3 4; do
            until [ -e /tmp/over ]; do sleep 0.2; done 2>/dev/null &
        done
        inject "$@"
        wait $verifier
        inject N Y 0
        : >/tmp/over
        wait
        echo "CAROM-TRIED $(sed -n 's/^CAROM-VERIFY \([0-9]*\).*/\1/p' /tmp/console) $(grep -cE 'verify: |verify failed|bad (magic|header)' /tmp/verify)"
    done
    echo "CAROM-FAILED $(($(failures) - before))"
}
failures() { dmesg | grep -c 'FAULT_INJECTION: forcing a failure'; }
fallbacks() { awk '/^fallback_/ { n += $2 } END { print n + 0 }' $POOLS/*/stats; }
"#;

#[guest_test]
fn memory_runs_out_anywhere_while_io_runs() {
    // All I/O must bounce, because a mapping outside of the pools may fail. So the pools first allocate the memory that they
    // need, and keep it. Some debugging checks report that they have no memory and turn themselves off. KNOWN excludes these
    // reports.
    let verify = workload::fio_verify(4, 16);
    let work = format!(
        r#"
KNOWN='cacheline tracking ENOMEM|debugging out of memory|ODEBUG: Out of memory'
verify() {{
{verify}
}}
{INJECT}
# The pools keep idle chunks for 20 s, and the last chunk of each kind and size six times as long.
for pool in $POOLS/*; do echo 20000 >"$pool/idle_ms"; done
verify
verify
verify
BEFORE=$(fallbacks)
try_io Y N 3
try_io N Y 10
echo "CAROM-FALLBACKS $(($(fallbacks) - BEFORE))"
verify
settle
"#
    );

    for (name, windows) in [("debug-anywhere", true), ("debug-anywhere-pages", false)] {
        let guest =
            guest(name, &format!("{WAIT_FOR_NVME}{work}")).iommu_device(&SITE.nvme[0]).cmdline("iommu.bounce=256K");
        let outcome = run(&if windows { guest.bounce("size=64M") } else { guest });

        verified(&outcome, 4);
        settled(&outcome);
        let tried: Vec<&str> = outcome.values("CAROM-TRIED").collect();
        assert_eq!(tried.len(), 6, "{tried:?}");
        // fio may fail for lack of memory, but data that it has read must be correct.
        assert!(tried.iter().all(|one| one.ends_with(" 0")), "{tried:?}; console:\n{}", outcome.console);
        assert!(tried.iter().any(|one| one.starts_with("0 ")), "{tried:?}; console:\n{}", outcome.console);
        let failed: Vec<&str> = outcome.values("CAROM-FAILED").collect();
        assert!(failed.len() == 2 && failed.iter().all(|count| *count != "0"), "{failed:?}");
        assert_eq!(number(&outcome, "CAROM-FALLBACKS"), 0, "console:\n{}", outcome.console);
    }
}

#[guest_test]
fn memory_runs_out_while_mappings_are_removed() {
    // Nothing bounces, so every transfer is mapped and unmapped. About every third allocation of viommu_unmap_pages() fails.
    //
    // If an unmapped range were still mapped on the host, the next mapping at this address would fail unnoticed, and the drive
    // would access the memory of the old mapping. If the range were still mapped only in the guest's records, the drive could
    // not return to its domain.
    let work = format!(
        r#"
START=$(sed -n 's/ t viommu_unmap_pages$//p' /proc/kallsyms)
END=$(sed 's/ .*//' /proc/kallsyms | sort -u | grep -A1 "^$START\$" | tail -n 1)
knobs=/sys/kernel/debug/failslab
echo N >$knobs/task-filter
echo 0x$START >$knobs/require-start
echo 0x$END >$knobs/require-end
echo 1 >$knobs/interval
echo 1 >$knobs/verbose
echo -1 >$knobs/times
{verify}
echo 33 >$knobs/probability
{verify}
{verify}
echo 0 >$knobs/probability
echo "CAROM-FAILED $(dmesg | grep -c 'FAULT_INJECTION: forcing a failure')"
echo "$NVME" >/sys/bus/pci/drivers/nvme/unbind
lend_to_vfio
bind_nvme
{verify}
"#,
        verify = workload::fio_verify(4, 32)
    );

    let guest = guest("debug-unmap", &format!("{WAIT_FOR_NVME}{work}"));
    let outcome = run(&guest.iommu_device(&SITE.nvme[0]).cmdline("iommu.bounce=off"));

    verified(&outcome, 4);
    assert!(number(&outcome, "CAROM-FAILED") > 20, "console:\n{}", outcome.console);
}

#[guest_test]
fn guest_sleeps_with_chunks_backed() {
    // Use the kernel's test mode of suspend (`pm_test`), in which all drivers and the platform suspend and then resume. The
    // NVMe driver of Linux 6.12 freezes its queues in one work item and thaws them in another. KNOWN excludes lockdep's reports
    // about this.
    let verify = workload::fio_verify(4, 32);
    let work = format!(
        r#"
KNOWN='workqueue leaked atomic, lock or RCU|possible circular'
{verify}
echo "CAROM-BACKED $(awk '/^chunks / {{ n += $2 }} END {{ print n }}' $POOLS/*/stats)"
for level in freezer devices platform; do
    echo $level >/sys/power/pm_test
    echo freeze >/sys/power/state || exit 94
    echo "CAROM-SLEPT $level"
    {verify}
done
settle
"#
    );

    let outcome = run(&with_drive("debug-sleep", &work));

    verified(&outcome, 4);
    settled(&outcome);
    assert!(number(&outcome, "CAROM-BACKED") > 0, "console:\n{}", outcome.console);
    assert_eq!(outcome.values("CAROM-SLEPT").collect::<Vec<_>>(), ["freezer", "devices", "platform"]);
}

#[guest_test]
fn budget_is_cut_under_load() {
    let verify = workload::fio_verify(6, 32);
    // fio keeps requests of all sizes in flight. So too few chunks are idle when the budget is cut, and the pool must also
    // drain chunks that are in use.
    let job = format!(
        r#"{FUNCTIONS}{WAIT_FOR_NVME}
fio --name=load --filename=/dev/nvme0n1 --direct=1 --rw=randread --ioengine=libaio --iodepth=16 --bsrange=4k-256k --blockalign=4k \
    --size=64M --time_based --runtime=3600 >/tmp/load 2>&1 &
LOAD=$!
for round in 1 2 3 4 5 6; do
{verify}
echo CAROM-ROUND
done
kill $LOAD
wait $LOAD
settle
reports
echo CAROM-END
sleep 60
"#
    );
    let limit = TIME_LIMIT;
    let mut vmm = ApiVmm::start(&SITE, &job).unwrap();
    let put = |path: &str, body: Option<Value>| {
        let (status, answer) = vmm.call("PUT", path, body.as_ref()).unwrap();
        assert_eq!(status, 204, "{answer}");
    };
    let mib = 1_u64 << 20;
    let cmdline = "console=ttyS0 quiet panic=-1 oops=panic mitigations=off iommu.strict=1 log_buf_len=4M";
    put(
        "/api/v1/vm.create",
        Some(json!({
            "payload": {"kernel": vmm.kernel(), "initramfs": vmm.initramfs(), "cmdline": cmdline},
            "serial": {"mode": "File", "file": vmm.console_file()},
            "memory": {"size": 1024 * mib},
            "devices": [{"path": Site::sysfs(&SITE.nvme[0]), "iommu": true}],
            "iommu_bounce": {"size": 32 * mib},
        })),
    );
    put("/api/v1/vm.boot", None);
    vmm.wait_for("CAROM-ROUND", 1, limit).unwrap();

    let backed =
        || vmm.call("GET", "/api/v1/vm.iommu-bounce", None).unwrap().1["counters"]["window_bytes"].as_u64().unwrap();
    let mut slowest = Duration::ZERO;
    while vmm.console().matches("CAROM-ROUND").count() < 6 {
        put("/api/v1/vm.iommu-bounce", Some(json!({"budget": 4 * mib})));
        let start = Instant::now();
        while backed() > 4 * mib {
            assert!(start.elapsed() < Duration::from_secs(60), "the guest keeps its chunks");
            thread::sleep(Duration::from_millis(20));
        }
        slowest = slowest.max(start.elapsed());
        thread::sleep(Duration::from_secs(3));
        put("/api/v1/vm.iommu-bounce", Some(json!({"budget": 32 * mib})));
        thread::sleep(Duration::from_secs(3));
    }
    vmm.wait_for("CAROM-END", 1, limit).unwrap();
    let console = vmm.console();
    put("/api/v1/vmm.shutdown", None);
    assert!(vmm.wait(Duration::from_secs(60)).unwrap().success());

    println!("CAROM-BUDGET-FOLLOWED-MS {}", slowest.as_millis());
    let value = |key: &str| console.lines().filter_map(|line| line.trim().strip_prefix(key)).next_back();
    assert_eq!(value("CAROM-REPORTS "), Some("0"), "{console}");
    assert_eq!(value("CAROM-MAPPED "), Some("0"), "{console}");
    assert_eq!(value("CAROM-CHUNKS "), Some("0"), "{console}");
    assert_eq!(console.matches("CAROM-VERIFY 0 ").count(), 6, "{console}");
    assert!(value("CAROM-SUM-chunks_drained ").is_some_and(|count| count != "0"), "{console}");
}

fn main() -> ExitCode {
    harness::main()
}

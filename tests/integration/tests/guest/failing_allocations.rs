// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Host whose kernel fails allocations for the VMM's system calls. Each such call fails with an error, and the guest's I/O
//! continues. No memory stays pinned, and no page table of the host's IOMMU remains.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use carom_integration::Site;
use carom_integration::api::ApiVmm;
use carom_integration::harness::{guest_test, tell};
use carom_integration::host_memory::DmaMemory;
use carom_integration::workload::{self, WAIT_FOR_NVME};
use serde_json::{Value, json};

use crate::api::BOOT_TIME;
use crate::disk::image;
use crate::hotplug::{create_and_boot, end, info, payload, pinned, put, wait_gone};
use crate::support::failing_allocations::{
    Allocator, FailingAllocations, control, fail_nth, nth_has_failed, nth_left, subject, threads,
};
use crate::support::{MIB, SITE};

/// Time during which allocations fail while a guest works.
const FAILING_TIME: Duration = Duration::from_secs(12);
/// Maximum n for which the test makes a thread's nth allocation fail. After this value, n starts again from 1.
const MOST: u32 = 24;
/// Interval between checks for a failed allocation.
const LOOK: Duration = Duration::from_millis(4);

/// Output of a round that read back all written data correctly.
const VERIFIED: &str = "CAROM-VERIFY 0 4194304";

/// Number of attempts to boot a VM, for each allocator. In each attempt, one allocation fails.
const STARTS: u64 = 16;
/// An allocation would fail after this amount of allocated memory. This test never allocates so much memory.
const NEVER: u64 = 1 << 30;

/// Number of API calls that create a disk, and number of API calls that create a snapshot. In each call, one allocation fails.
const OPERATIONS: u32 = 6;
/// Number of the allocation that would fail. This test never makes so many allocations.
const NEVER_NTH: u32 = 1 << 30;

/// Budgets that the test sets in turn, in MiB, so that the guest requests windows again and again.
const BUDGETS: [u64; 4] = [64, 4, 16, 2];
const BUDGET_TIME: Duration = Duration::from_millis(700);

/// True if a thread serves the virtio-iommu. vCPU threads serve the virtio-iommu in VM exits. The other two threads do no other
/// work.
fn serves_the_iommu(name: &str) -> bool {
    ["vcpu", "iommu_poll", "window-stash"].iter().any(|prefix| name.starts_with(prefix))
}

/// Runs a guest with `windows` bytes of windows. While the guest uses its drive, allocations fail in each thread that serves
/// the virtio-iommu. First, the thread's next allocation fails. After each failure, the thread makes more successful
/// allocations before the next failure: one, then two, and so on, until the [`MOST`]th allocation after a failure fails.
fn io_goes_on(iommufd: bool, windows: u64) {
    let before = DmaMemory::now().unwrap();
    let _failing = FailingAllocations::new();
    let verify = workload::fio_verify(4, 32);
    let mut vmm = ApiVmm::start(&SITE, &format!("{WAIT_FOR_NVME}\nwhile :; do\n{verify}\ndone\n")).unwrap();
    let drive = json!({"path": Site::sysfs(&SITE.nvme[0]), "iommu": true});
    let bounce = json!({"size": windows});
    create_and_boot(&vmm, json!({"platform": {"iommufd": iommufd}, "devices": [drive], "iommu_bounce": bounce}));
    vmm.wait_for(VERIFIED, 1, BOOT_TIME).unwrap();

    let serving: Vec<_> = threads(&vmm).into_iter().filter(|(name, _)| serves_the_iommu(name)).collect();
    let mut next = vec![0; serving.len()];
    let mut failed = vec![0_u32; serving.len()];
    let (start, mut budget_since) = (Instant::now(), Instant::now());
    let mut budgets = BUDGETS.iter().cycle();
    while start.elapsed() < FAILING_TIME {
        for (index, (name, thread)) in serving.iter().enumerate().filter(|(_, (_, thread))| nth_has_failed(thread)) {
            failed[index] += u32::from(next[index] > 0);
            next[index] = next[index] % MOST + 1;
            assert!(fail_nth(thread, next[index]), "{name} has ended: {:?} {:?}", threads(&vmm), vmm.wait(BOOT_TIME));
        }
        if windows > 0 && budget_since.elapsed() > BUDGET_TIME {
            let budget = budgets.next().expect("it never ends");
            put(&vmm, "vm.iommu-bounce", &json!({"budget": budget * MIB, "threshold": 0}));
            budget_since = Instant::now();
        }
        thread::sleep(LOOK);
    }
    assert!(serving.iter().all(|(_, thread)| fail_nth(thread, 0)));

    let done = vmm.console().matches(VERIFIED).count();
    let counted = vmm.call("GET", "/api/v1/vm.counters", None).unwrap().1["_iommu"].take();
    let of: Vec<_> = serving.iter().zip(&failed).map(|((name, _), failed)| format!("{name} {failed}")).collect();
    tell(&format!("iommufd {iommufd}, {windows} bytes of windows: {of:?} failed, {done} rounds: {counted}"));
    vmm.wait_for(VERIFIED, done + 2, BOOT_TIME).unwrap();
    let whole = vmm.whole_lines();
    let wrong = whole.lines().find(|line| line.starts_with("CAROM-VERIFY ") && *line != VERIFIED);
    assert_eq!(wrong, None);
    assert!(["failed_map", "failed_map_list", "failed_window_add"].iter().any(|name| counted[name] != 0), "{counted}");
    assert!(failed.iter().sum::<u32>() > MOST * 2, "{of:?}");
    assert_eq!((&counted["faults"], &counted["stuck_ranges"]), (&json!(0), &json!(0)), "{counted}");
    end(&mut vmm);
    before.wait_until_back().unwrap();
}

#[guest_test(
    needs(FailingAllocations),
    slow = "unit tests cover each error of the host; here, the host's kernel causes them",
    by_iommufd
)]
fn io_by_mappings_continues_while_allocations_fail_in_turn() {
    for iommufd in [false, true] {
        io_goes_on(iommufd, 0);
    }
}

#[guest_test(
    needs(FailingAllocations),
    slow = "unit tests cover each error of the host; here, the host's kernel causes them",
    by_iommufd
)]
fn io_by_windows_continues_while_allocations_fail_in_turn() {
    for iommufd in [false, true] {
        io_goes_on(iommufd, 64 * MIB);
    }
}

/// Calls `act` several times for each allocator. The argument of `act` describes the failure, for messages. In the first call,
/// no allocation fails. In each later call, one allocation of the VMM fails. The failing allocations are spread evenly over the
/// allocations of a call.
fn in_each_part_of_all(failing: &FailingAllocations, mut act: impl FnMut(&str)) {
    for allocator in [Allocator::Slab, Allocator::Pages] {
        failing.once_after(allocator, NEVER);
        act("nothing fails");
        let all = NEVER - failing.left(allocator);
        tell(&format!("{allocator:?}: {all} allocated without a failure (Slab: bytes; Pages: pages)"));
        for round in 0..STARTS {
            failing.once_after(allocator, all * round / STARTS);
            act(&format!("{allocator:?} {round} of {STARTS}"));
        }
    }
    failing.stop();
}

/// Like [`in_each_part_of_all`], but only allocations of the thread that creates devices and snapshots fail.
fn in_each_part_of_control(vmm: &ApiVmm, mut act: impl FnMut(&str)) {
    let thread = control(vmm);
    assert!(fail_nth(&thread, NEVER_NTH));
    act("nothing fails");
    let all = NEVER_NTH - nth_left(&thread);
    tell(&format!("{all} allocations"));
    assert!(all >= OPERATIONS, "{all}");
    for round in 0..OPERATIONS {
        assert!(fail_nth(&thread, 1 + all * round / OPERATIONS));
        act(&format!("{round} of {OPERATIONS}"));
    }
    assert!(fail_nth(&thread, 0));
}

/// Calls the API and returns the status, or `None` if the answer is lost for lack of memory. Asserts that an error has one
/// line.
fn ask(vmm: &ApiVmm, operation: &str, body: &Value, what: &str) -> Option<u16> {
    let body = Some(body).filter(|body| !body.is_null());
    let Ok((status, answer)) = vmm.call("PUT", &format!("/api/v1/{operation}"), body) else { return None };
    if status >= 400 {
        let text = answer.as_array().and_then(|texts| texts[0].as_str()).unwrap_or_default();
        assert!(text.len() > 20 && text.lines().count() == 1, "{what}: {operation}: {status} {answer}");
    }
    Some(status)
}

fn descriptors(vmm: &ApiVmm) -> usize {
    fs::read_dir(format!("/proc/{}/fd", vmm.pid())).unwrap().count()
}

/// The VM has no host device, because opening and closing a host device runs the kernel's ACPI interpreter, which panics if
/// its allocations fail.
#[guest_test(
    needs(FailingAllocations),
    slow = "vmm/tests/host_faults.rs fails each call; here, the host's kernel fails within the calls",
    by_iommufd
)]
fn vm_boots_or_is_refused_without_leaks_if_allocations_fail() {
    let before = DmaMemory::now().unwrap();
    let failing = FailingAllocations::new();
    let mut vmm = ApiVmm::start(&SITE, "echo CAROM-READY\nsleep 1000\n").unwrap();
    let disk = image(vmm.dir(), "disk.img");
    let config = json!({
        "payload": payload(&vmm, ""),
        "memory": {"size": 256 * MIB},
        "cpus": {"boot_vcpus": 2, "max_vcpus": 2},
        "serial": {"mode": "File", "file": vmm.console_file()},
        "console": {"mode": "Off"},
        "disks": [{"path": disk, "iommu": true}],
        "balloon": {"size": 0},
        "rng": {"src": "/dev/urandom", "iommu": true},
        "iommu_bounce": {"size": 16 * MIB},
    });
    subject(&vmm);
    let (mut open, mut booted, mut refused, mut lost, mut ended) = (None, 0, 0, 0, 0);
    in_each_part_of_all(&failing, |what| {
        let created = ask(&vmm, "vm.create", &config, what);
        let answer = ask(&vmm, "vm.boot", &Value::Null, what);
        let failed = failing.has_failed();
        failing.stop();
        // `vm.boot` may have succeeded even if its answer was lost.
        let Ok(there) = vmm.call("GET", "/api/v1/vm.info", None) else {
            // Rust's runtime aborts if it cannot allocate heap memory or a new thread's signal stack.
            let (status, said) = (vmm.wait(BOOT_TIME).unwrap(), vmm.said());
            assert!(failed && status.code().is_none() && said.contains("allocat"), "{what}: {status}: {said}");
            before.wait_until_back().unwrap_or_else(|error| panic!("{what}: {error:#}"));
            vmm.start_again(&SITE, &[]).unwrap();
            subject(&vmm);
            ended += 1;
            return;
        };
        let state = there.1["state"].as_str().unwrap_or_default();
        let runs = state == "Running";
        assert!(failed || runs, "{what}: {created:?} {answer:?} {there:?}");
        match answer {
            Some(204) => assert!(runs, "{what}: {state}"),
            Some(_) => assert!(!runs, "{what}: {state}"),
            None => {}
        }
        lost += u32::from(created.is_none()) + u32::from(answer.is_none());
        if runs {
            booted += 1;
        } else {
            refused += 1;
        }
        if there.0 == 200 {
            put(&vmm, "vm.delete", &Value::Null);
        }
        assert_eq!(pinned(&vmm), 0, "{what}");
        before.wait_until_back().unwrap_or_else(|error| panic!("{what}: {error:#}"));
        let now = descriptors(&vmm);
        let known = *open.get_or_insert(now);
        // The VMM closes the descriptor of an ended connection only after a moment.
        let start = Instant::now();
        while descriptors(&vmm) > known {
            assert!(start.elapsed() < BOOT_TIME, "{what}: {} descriptors are open, not {known}", descriptors(&vmm));
            thread::sleep(LOOK);
        }
    });
    tell(&format!("{booted} VMs booted, {refused} were refused, {lost} answers were lost, {ended} VMMs ended"));
    assert!(booted > 2 && refused > 2);
    put(&vmm, "vm.create", &config);
    put(&vmm, "vm.boot", &Value::Null);
    vmm.wait_for("CAROM-READY", 1, BOOT_TIME).unwrap();
    put(&vmm, "vmm.shutdown", &Value::Null);
}

#[guest_test(
    needs(FailingAllocations),
    slow = "vmm/tests/host_faults.rs fails each call; here, the host's kernel fails within the calls",
    by_iommufd
)]
fn guest_continues_if_allocations_for_disk_or_snapshot_fail() {
    let before = DmaMemory::now().unwrap();
    let _failing = FailingAllocations::new();
    let verify = workload::fio_verify_on("/dev/vda", 4, 32);
    let mut vmm = ApiVmm::start(&SITE, &format!("while :; do\n{verify}\ndone\n")).unwrap();
    let disk = image(vmm.dir(), "disk.img");
    create_and_boot(
        &vmm,
        json!({
            "memory": {"size": 256 * MIB},
            "disks": [{"path": disk, "iommu": true}],
            "iommu_bounce": {"size": 16 * MIB},
        }),
    );
    let verified = || vmm.console().matches("CAROM-VERIFY 0 4194304").count();
    vmm.wait_for("CAROM-VERIFY 0 4194304", 1, BOOT_TIME).unwrap();
    let goes_on = |what: &str| {
        assert_eq!(info(&vmm)["state"], "Running", "{what}");
        let done = verified();
        vmm.wait_for("CAROM-VERIFY 0 4194304", done + 1, BOOT_TIME).unwrap_or_else(|error| panic!("{what}: {error}"));
    };

    let more = json!({"path": image(vmm.dir(), "more.img"), "id": "more"});
    let (mut done, mut refused) = (0, 0);
    in_each_part_of_control(&vmm, |what| {
        ask(&vmm, "vm.add-disk", &more, what);
        if info(&vmm)["device_tree"]["more"].is_null() {
            refused += 1;
        } else {
            done += 1;
            // Wait here, because a guest that has not noticed the new disk yet would not release it.
            goes_on(what);
            put(&vmm, "vm.remove-device", &json!({"id": "more"}));
            wait_gone(&vmm, "more");
        }
        goes_on(what);
        before.wait_until_back().unwrap_or_else(|error| panic!("{what}: {error:#}"));
    });
    tell(&format!("{done} disks were added, {refused} were refused"));
    assert!(done > 0 && refused > 0);

    let (mut done, mut refused, mut number) = (0, 0, 0);
    in_each_part_of_control(&vmm, |what| {
        number += 1;
        let place = vmm.dir().join(format!("snapshot-{number}"));
        let destination = json!({"destination_url": format!("file://{}", place.display())});
        put(&vmm, "vm.pause", &Value::Null);
        if ask(&vmm, "vm.snapshot", &destination, what) == Some(204) {
            done += 1;
        } else {
            refused += 1;
            put(&vmm, "vm.snapshot", &destination);
        }
        fs::remove_dir_all(&place).unwrap_or_else(|error| panic!("{what}: {error}"));
        put(&vmm, "vm.resume", &Value::Null);
        goes_on(what);
    });
    tell(&format!("{done} snapshots were made, {refused} were refused"));
    assert!(done > 0 && refused > 0);
    let console = vmm.console();
    assert_eq!(console.matches("CAROM-VERIFY ").count(), console.matches("CAROM-VERIFY 0 ").count(), "{console}");
    end(&mut vmm);
    before.wait_until_back().unwrap();
}

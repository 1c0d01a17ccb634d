// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Limit on the memory that a guest without windows may map. The tests also compare the VMM's counters with the host kernel's.

use std::thread;
use std::time::{Duration, Instant};

use carom_integration::api::ApiVmm;
use carom_integration::harness::guest_test;
use carom_integration::workload::{self, WAIT_FOR_NVME};
use carom_integration::{Kernel, Site};
use serde_json::{Value, json};

use crate::api::BOOT_TIME;
use crate::hotplug::{create_and_boot, info, pinned, put};
use crate::support::{MIB, SITE};

/// Bytes that the guest may map in addition to its permanent mappings. This is one and a half times the guest's largest request
/// (128 KiB).
const ROOM: u64 = 192 << 10;

fn counter(vmm: &ApiVmm, device: &str, name: &str) -> u64 {
    let counters = vmm.call("GET", "/api/v1/vm.counters", None).unwrap().1;
    counters[device][name].as_u64().unwrap_or_else(|| panic!("{device} {name}: {counters}"))
}

/// Waits for a moment at which the guest neither maps nor unmaps memory, and returns the bytes pinned then. Asserts that the
/// VMM and the host's kernel count the same number.
fn quiet(vmm: &ApiVmm) -> u64 {
    let start = Instant::now();
    loop {
        let of = || (counter(vmm, "_iommu", "pinned_bytes"), maps(vmm, "requests"));
        let (before, host, after) = (of(), pinned(vmm), of());
        if before == after && host == after.0 {
            return host;
        }
        assert!(start.elapsed() < Duration::from_secs(120), "the kernel counts {host} bytes, the VMM counts {after:?}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Returns the number of requests of the virtio-iommu that mapped memory, if `name` is `requests`. If `name` is `failed`, returns the number
/// of requests that failed to map memory.
fn maps(vmm: &ApiVmm, name: &str) -> u64 {
    ["map", "map_list"].map(|kind| counter(vmm, "_iommu", &format!("{name}_{kind}"))).iter().sum()
}

fn limit(vmm: &ApiVmm, bytes: u64) {
    put(vmm, "vm.iommu-bounce", &json!({"max_mapped": bytes}));
}

fn io_goes_on_above_the_limit(kernel: Kernel) {
    let round = format!("{}\nsleep 1\n", workload::fio_verify(8, 32));
    let job = format!("{WAIT_FOR_NVME}\nwhile :; do\n{round}\ndone\n");
    let vmm = ApiVmm::start_with(&SITE, kernel, &job).unwrap();
    let drive = json!({"path": Site::sysfs(&SITE.nvme[0]), "iommu": true, "id": "drive"});
    create_and_boot(&vmm, json!({"devices": [drive], "iommu_bounce": {"size": 0, "max_mapped": 512 * MIB}}));
    let rounds = |more: usize| {
        let done = vmm.console().matches("CAROM-VERIFY 0 ").count();
        vmm.wait_for("CAROM-VERIFY 0 ", done + more, BOOT_TIME * 2).unwrap();
    };
    rounds(1);
    let kept = quiet(&vmm);
    assert!(kept > 0, "the drive's queues are not mapped");
    let all = || ["mapped_bytes", "pinned_bytes", "peak_pinned_bytes"].map(|name| counter(&vmm, "_iommu", name));
    let [mapped, _, peak] = all();
    assert!(peak > kept + ROOM, "the peak of {peak} bytes is too low for a limit; {kept} bytes stay mapped");
    assert_eq!(maps(&vmm, "failed"), 0);
    assert_eq!(counter(&vmm, "drive", "pinned_bytes"), counter(&vmm, "drive", "mapped_bytes"));

    // The new limit does not unmap anything, even if the guest has already mapped more than the limit.
    limit(&vmm, mapped + ROOM);
    assert_eq!(info(&vmm)["iommu_bounce"]["max_mapped"], mapped + ROOM);
    let done = vmm.console().matches("CAROM-VERIFY 0 ").count();
    let start = Instant::now();
    while vmm.console().matches("CAROM-VERIFY 0 ").count() < done + 2 {
        let mapped_now = counter(&vmm, "_iommu", "mapped_bytes");
        // At first, a round that began before the limit was set may still have more memory mapped.
        assert!(
            mapped_now <= mapped + ROOM || start.elapsed() < Duration::from_secs(10),
            "{mapped_now} bytes are mapped; the limit is {mapped} + {ROOM}"
        );
        assert!(start.elapsed() < BOOT_TIME * 2, "the I/O does not continue:\n{}", vmm.console());
        thread::sleep(Duration::from_millis(20));
    }
    let refused = maps(&vmm, "failed");
    assert!(refused > 0, "nothing was refused");

    limit(&vmm, 512 * MIB);
    rounds(1);
    let after = maps(&vmm, "failed");
    rounds(1);
    assert_eq!(maps(&vmm, "failed"), after, "mappings are still refused");
    println!("CAROM-LIMIT kept {kept} peak {peak} refused {refused}");
    put(&vmm, "vmm.shutdown", &Value::Null);
    let console = vmm.console();
    assert!(!console.contains("I/O error"), "{console}");
    // A round may be slow, but no round may have failed or read wrong data.
    let wrong: Vec<&str> = console
        .lines()
        .filter(|line| line.starts_with("CAROM-VERIFY ") && !line.starts_with("CAROM-VERIFY 0 "))
        .collect();
    assert!(wrong.is_empty(), "{wrong:?}\n{console}");
}

#[guest_test(slow = "unit tests and the engine's model cover the limit; this shows the driver's reaction", by_iommufd)]
fn guest_above_the_limit_gets_nomem_and_its_io_continues() {
    io_goes_on_above_the_limit(Kernel::Patched);
}

#[guest_test(slow = "the same test runs on the older kernel")]
fn newer_kernel_above_the_limit_gets_nomem_and_io_continues() {
    io_goes_on_above_the_limit(Kernel::Newer);
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! RAM that a guest returns to the host while the guest uses its drive, with and without the virtio-iommu.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use carom_integration::Site;
use carom_integration::api::ApiVmm;
use carom_integration::harness::guest_test;
use carom_integration::workload::{self, WAIT_FOR_NVME};
use serde_json::{Value, json};

use crate::api::BOOT_TIME;
use crate::hotplug::{create_and_boot, end, info, put};
use crate::support::{MIB, SITE};

/// Returns a job that uses memory once, frees it, and then writes and verifies the drive in endless rounds. After every fourth
/// round, the job uses memory again, unless a large balloon leaves the guest too little RAM.
fn use_memory_and_work() -> String {
    let verify = workload::fio_verify(4, 8);
    format!(
        "{WAIT_FOR_NVME}
fill() {{ dd if=/dev/zero of=/fill bs=1M count=256 2>/dev/null; rm /fill; }}
fill
echo CAROM-READY
n=0
while :; do
    {verify}
    n=$((n + 1))
    free=$(awk '/MemTotal/ {{ print $2 }}' /proc/meminfo)
    echo \"CAROM-ROUND $n $free\"
    [ $((n % 4)) = 0 ] && [ $free -gt 400000 ] && fill
done
"
    )
}

fn boot(balloon: &Value, iommu: bool) -> ApiVmm {
    let vmm = ApiVmm::start(&SITE, &use_memory_and_work()).unwrap();
    let drive = json!({"path": Site::sysfs(&SITE.nvme[0]), "iommu": iommu, "id": "drive"});
    create_and_boot(&vmm, json!({"balloon": balloon, "devices": [drive]}));
    vmm.wait_for("CAROM-READY", 1, BOOT_TIME).unwrap();
    vmm
}

/// Returns the VMM's resident memory, in bytes.
fn resident(vmm: &ApiVmm) -> u64 {
    let text = fs::read_to_string(format!("/proc/{}/status", vmm.pid())).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

fn wait_until(vmm: &ApiVmm, what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(
            start.elapsed() < BOOT_TIME,
            "{what}: {} resident, {}\n{}",
            resident(vmm),
            counters(vmm),
            vmm.console()
        );
        thread::sleep(Duration::from_millis(100));
    }
}

fn counters(vmm: &ApiVmm) -> Value {
    vmm.call("GET", "/api/v1/vm.counters", None).unwrap().1["_balloon"].take()
}

/// Sets the size of a balloon to `mib` MiB, and waits until the balloon has this size. The guest must have 512 MiB of RAM.
pub(crate) fn resize(vmm: &ApiVmm, mib: u64) {
    put(vmm, "vm.resize", &json!({"desired_balloon": mib * MIB}));
    wait_until(vmm, "the balloon", || info(vmm)["memory_actual_size"] == (512 - mib) * MIB);
}

/// Waits for two more rounds of the job, and asserts that the data read from the drive was correct in all rounds.
fn drive_works(vmm: &ApiVmm) {
    let rounds = vmm.console().matches("CAROM-ROUND").count();
    vmm.wait_for("CAROM-ROUND", rounds + 2, BOOT_TIME).unwrap();
    let console = vmm.console();
    let (done, sound) = (console.matches("CAROM-ROUND").count(), console.matches("CAROM-VERIFY 0 4194304").count());
    assert!(sound >= done, "{sound} of {done} rounds were correct:\n{console}");
}

#[guest_test(slow = "free_pages_reach_the_host_while_an_iommu_drive_works returns RAM in the same way")]
fn balloon_inflates_and_deflates_while_an_iommu_drive_works() {
    let vmm = boot(&json!({"size": 0, "deflate_on_oom": true}), true);
    let before = resident(&vmm);
    assert!(before > 256 * MIB, "{before}");
    resize(&vmm, 320);
    let inflated = resident(&vmm);
    println!("resident: {} MiB, with a balloon of 320 MiB {} MiB", before / MIB, inflated / MIB);
    println!("counters: {}", counters(&vmm));
    assert!(inflated + 200 * MIB < before, "{before} bytes were resident without the balloon, {inflated} with it");
    drive_works(&vmm);
    resize(&vmm, 0);
    wait_until(&vmm, "the memory is not used again", || resident(&vmm) > inflated + 200 * MIB);
    drive_works(&vmm);
    let counted = counters(&vmm);
    assert_eq!((&counted["inflated_bytes"], &counted["deflated_bytes"]), (&json!(320 * MIB), &json!(320 * MIB)));
    let given = counted["given_back_bytes"].as_u64().unwrap() + counted["kept_back_bytes"].as_u64().unwrap();
    assert_eq!((given, &counted["refused_bytes"]), (320 * MIB, &json!(0)));
    let faults = &vmm.call("GET", "/api/v1/vm.counters", None).unwrap().1["_iommu"]["faults"];
    assert_eq!(*faults, 0);
    end(vmm);
}

#[guest_test]
fn free_pages_reach_the_host_while_an_iommu_drive_works() {
    let vmm = boot(&json!({"size": 0, "free_page_reporting": true}), true);
    wait_until(&vmm, "free pages", || resident(&vmm) < 220 * MIB);
    println!("counters: {}", counters(&vmm));
    drive_works(&vmm);
    let counted = counters(&vmm);
    assert!(counted["reported_bytes"].as_u64() >= Some(200 * MIB), "{counted}");
    assert_eq!(counted["inflated_bytes"], 0);
    end(vmm);
}

#[guest_test(slow = "unit tests cover that pinned pages stay")]
fn balloon_returns_no_ram_while_a_drive_maps_all_ram() {
    let vmm = boot(&json!({"size": 0}), false);
    let before = resident(&vmm);
    resize(&vmm, 128);
    let counted = counters(&vmm);
    assert_eq!((&counted["kept_back_bytes"], &counted["given_back_bytes"]), (&json!(128 * MIB), &json!(0)));
    assert!(resident(&vmm) + 16 * MIB > before);
    drive_works(&vmm);
    end(vmm);
}

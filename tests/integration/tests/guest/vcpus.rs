// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! vCPUs that are added to a running guest and removed from it.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use carom_integration::api::ApiVmm;
use carom_integration::harness::guest_test;
use carom_integration::workload::{self, WAIT_FOR_NVME};
use carom_integration::{Kernel, Site};
use serde_json::{Value, json};

use crate::api::BOOT_TIME;
use crate::hotplug::{create, create_and_boot, end, info, put};
use crate::support::{MIB, SITE};

/// Shell functions that online added vCPUs, like the udev rules of some distributions. `use_vcpus` prints `CAROM-VCPUS` and the
/// number of online vCPUs when this number has changed.
pub(crate) const USE_VCPUS: &str = r#"
at_work() { grep -c '^processor' /proc/cpuinfo; }
use_vcpus() {
    for online in /sys/devices/system/cpu/cpu[0-9]*/online; do
        [ "$(cat "$online" 2>/dev/null)" != 0 ] || echo 1 >"$online"
    done 2>/dev/null
    now=$(at_work)
    [ "$now" = "$last" ] || echo "CAROM-VCPUS $now"
    last=$now
}
"#;

/// Returns a job that prints the initial number of vCPUs and each change.
fn watch_vcpus() -> String {
    format!(
        "{USE_VCPUS}
last=$(at_work)
echo \"CAROM-READY $last\"
while :; do
    use_vcpus
    sleep 0.2
done
"
    )
}

/// Like [`watch_vcpus`], with endless verified I/O on the drive in the background.
fn work_and_watch_vcpus() -> String {
    let verify = workload::fio_verify(4, 8);
    format!("{WAIT_FOR_NVME}\n(while :; do\n{verify}\ndone) &\n{}", watch_vcpus())
}

fn resize(vmm: &ApiVmm, vcpus: u32) -> (u16, String) {
    let (status, answer) = vmm.call("PUT", "/api/v1/vm.resize", Some(&json!({"desired_vcpus": vcpus}))).unwrap();
    (status, answer.to_string())
}

/// Requests this number of vCPUs. Repeats the request, as a client must, while the guest is still removing a vCPU that is now
/// requested again.
fn resize_in_time(vmm: &ApiVmm, vcpus: u32) {
    let start = Instant::now();
    loop {
        match resize(vmm, vcpus) {
            (204, _) => return,
            (429, why) => {
                assert!(why.contains("about to be removed") && start.elapsed() < BOOT_TIME, "{why}");
                thread::sleep(Duration::from_millis(100));
            }
            (status, why) => panic!("{status}: {why}"),
        }
    }
}

/// Waits until the process has threads for exactly `vcpus` vCPUs.
fn wait_for_threads(vmm: &ApiVmm, vcpus: u32) {
    let wanted: Vec<String> = (0..vcpus).map(|number| format!("vcpu{number}")).collect();
    let start = Instant::now();
    loop {
        let tasks = fs::read_dir(format!("/proc/{}/task", vmm.pid())).unwrap();
        let names = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
        let mut names: Vec<String> = names.map(|name| name.trim().into()).collect();
        names.retain(|name| name.starts_with("vcpu"));
        names.sort_unstable();
        if names == wanted {
            return;
        }
        assert!(start.elapsed() < BOOT_TIME, "threads of vCPUs: {names:?}, wanted {wanted:?}\n{}", vmm.console());
        thread::sleep(Duration::from_millis(100));
    }
}

/// Waits until the guest has printed for the `times`th time that this number of vCPUs is online.
fn wait_for_vcpus(vmm: &ApiVmm, vcpus: u32, times: usize) {
    vmm.wait_for(&format!("CAROM-VCPUS {vcpus}\n"), times, BOOT_TIME).unwrap();
}

/// Boots a guest with 1 vCPU and a maximum of 4. `more` is additional configuration, and may replace these numbers.
fn boot(kernel: Kernel, job: &str, more: Value) -> ApiVmm {
    let vmm = ApiVmm::start_with(&SITE, kernel, job).unwrap();
    let mut config = json!({"cpus": {"boot_vcpus": 1, "max_vcpus": 4}});
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    create_and_boot(&vmm, config);
    vmm.wait_for("CAROM-READY", 1, BOOT_TIME).unwrap();
    vmm
}

/// Returns the number of verified passes of the drive. Asserts that no pass failed.
pub(crate) fn verified(vmm: &ApiVmm) -> usize {
    let whole = vmm.whole_lines();
    let bad = whole.lines().find(|line| line.starts_with("CAROM-VERIFY ") && !line.starts_with("CAROM-VERIFY 0"));
    assert!(bad.is_none(), "{whole}");
    whole.matches("CAROM-VERIFY 0 4194304").count()
}

/// Waits until the drive was verified in a pass that begins after this call.
fn wait_verified(vmm: &ApiVmm) {
    // The current pass began before this call, so wait for two passes.
    let wanted = verified(vmm) + 2;
    vmm.wait_for("CAROM-VERIFY 0 4194304", wanted, BOOT_TIME).unwrap();
}

fn come_and_go_while_a_drive_works(kernel: Kernel, rounds: usize) {
    let drive = json!([{"path": Site::sysfs(&SITE.nvme[0]), "iommu": true, "id": "drive"}]);
    let vmm = boot(kernel, &work_and_watch_vcpus(), json!({"devices": drive, "iommu_bounce": {"size": 16 * MIB}}));
    vmm.wait_for("CAROM-READY 1\n", 1, BOOT_TIME).unwrap();
    for vcpus in [0, 5] {
        let (status, why) = resize(&vmm, vcpus);
        let wanted = format!("desired_vcpus: {vcpus} is not between 1 and 4 (cpus.max_vcpus)");
        assert!(status == 400 && why.contains(&wanted), "{status}: {why}");
    }
    // Only one vCPU is added here, so that this test fails if the VMM forgets to register the vCPU's local APIC. Adding a
    // second vCPU would hide this error, because KVM then notices both local APICs.
    assert_eq!(resize(&vmm, 2), (204, "null".into()));
    wait_for_vcpus(&vmm, 2, 1);
    for round in 1..=rounds {
        assert_eq!(resize(&vmm, 4), (204, "null".into()));
        assert_eq!(info(&vmm)["config"]["cpus"]["boot_vcpus"], 4);
        wait_for_vcpus(&vmm, 4, round);
        wait_for_threads(&vmm, 4);
        wait_verified(&vmm);

        assert_eq!(resize(&vmm, 2), (204, "null".into()));
        assert_eq!(info(&vmm)["config"]["cpus"]["boot_vcpus"], 2);
        wait_for_vcpus(&vmm, 2, round + 1);
        wait_for_threads(&vmm, 2);
        wait_verified(&vmm);
    }
    let counters = vmm.call("GET", "/api/v1/vm.counters", None).unwrap().1;
    assert_eq!(counters["_iommu"]["faults"], 0, "{counters}");
    let events = vmm.events().unwrap();
    for event in ["resizing", "resized"] {
        assert_eq!(events.iter().filter(|reported| reported.event == event).count(), 2 * rounds + 1, "{event}");
    }

    // After a reboot, the guest has the last requested number of vCPUs, even if the guest had not released a vCPU before.
    resize_in_time(&vmm, 4);
    wait_for_vcpus(&vmm, 4, rounds + 1);
    put(&vmm, "vm.pause", &Value::Null);
    assert_eq!(resize(&vmm, 3), (204, "null".into()));
    put(&vmm, "vm.reboot", &Value::Null);
    vmm.wait_for("CAROM-READY 3\n", 1, BOOT_TIME).unwrap();
    wait_for_threads(&vmm, 3);
    wait_verified(&vmm);
    resize_in_time(&vmm, 4);
    wait_for_vcpus(&vmm, 4, rounds + 2);
    wait_verified(&vmm);
    end(vmm);
}

#[guest_test]
fn vcpus_are_added_and_removed_while_an_iommu_drive_works() {
    come_and_go_while_a_drive_works(Kernel::Patched, 2);
}

#[guest_test(slow = "the guest with the older kernel does the same")]
fn vcpus_are_added_and_removed_with_the_newer_kernel() {
    come_and_go_while_a_drive_works(Kernel::Newer, 2);
}

#[guest_test(slow = "vcpus_are_added_and_removed_while_an_iommu_drive_works runs two rounds")]
fn vcpus_are_added_and_removed_twenty_times() {
    come_and_go_while_a_drive_works(Kernel::Patched, 20);
}

/// Shell lines that make the guest refuse once to release a vCPU.
const REFUSE_ONCE: &str = r#"
enabled=/sys/firmware/acpi/hotplug/processor/enabled
echo 0 >$enabled
(
    while ! dmesg | grep -q 'Eject disabled'; do sleep 0.1; done
    echo CAROM-REFUSED
    echo 1 >$enabled
) &
"#;

#[guest_test]
fn guest_that_keeps_a_vcpu_can_be_asked_again() {
    let job = format!("{REFUSE_ONCE}{}", watch_vcpus());
    let vmm = boot(Kernel::Patched, &job, json!({"cpus": {"boot_vcpus": 2, "max_vcpus": 2}}));
    assert_eq!(resize(&vmm, 1), (204, "null".into()));
    vmm.wait_for("CAROM-REFUSED", 1, BOOT_TIME).unwrap();
    // The guest's refusal ends the removal of the vCPU, so the vCPU can be requested again.
    resize_in_time(&vmm, 2);
    wait_for_threads(&vmm, 2);
    assert!(!vmm.console().contains("CAROM-VCPUS 1"), "{}", vmm.console());
    assert_eq!(resize(&vmm, 1), (204, "null".into()));
    wait_for_vcpus(&vmm, 1, 1);
    wait_for_threads(&vmm, 1);
    resize_in_time(&vmm, 2);
    wait_for_vcpus(&vmm, 2, 1);
    end(vmm);
}

#[guest_test]
fn vcpus_added_before_the_guest_listens_are_found() {
    let vmm = ApiVmm::start(&SITE, &watch_vcpus()).unwrap();
    create(&vmm, json!({"cpus": {"boot_vcpus": 1, "max_vcpus": 3}}));
    assert_eq!(resize(&vmm, 4).0, 400);
    assert_eq!(resize(&vmm, 2), (204, "null".into()));
    put(&vmm, "vm.boot", &Value::Null);
    assert_eq!(resize(&vmm, 3), (204, "null".into()));
    wait_for_threads(&vmm, 3);
    let start = Instant::now();
    while !["CAROM-READY 3\n", "CAROM-VCPUS 3\n"].iter().any(|line| vmm.console().contains(line)) {
        assert!(start.elapsed() < BOOT_TIME, "{}", vmm.console());
        thread::sleep(Duration::from_millis(100));
    }
    // Request a valid number of vCPUs and an invalid size of RAM. The call must change nothing.
    let both = json!({"desired_vcpus": 1, "desired_ram": 1024 * MIB});
    let (status, why) = vmm.call("PUT", "/api/v1/vm.resize", Some(&both)).unwrap();
    assert!(status == 400 && why.to_string().contains("desired_ram"), "{status}: {why}");
    assert_eq!(info(&vmm)["config"]["cpus"]["boot_vcpus"], 3);
    end(vmm);
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! RAM that is added to a running guest. The guest's drive uses this RAM, with and without the virtio-iommu.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use carom_integration::api::ApiVmm;
use carom_integration::harness::guest_test;
use carom_integration::workload::{self, WAIT_FOR_NVME};
use carom_integration::{Kernel, Site};
use serde_json::{Value, json};

use crate::api::BOOT_TIME;
use crate::hotplug::{create_and_boot, end, info, payload, pinned, put, wait_gone};
use crate::support::{MIB, SITE};

/// Returns a job that prints the size of the memory, and verifies I/O on the drive each time the size has grown.
fn grow_and_work() -> String {
    let verify = workload::fio_verify(4, 8);
    format!(
        "{WAIT_FOR_NVME}
mem() {{ awk '/MemTotal/ {{ print $2 }}' /proc/meminfo; }}
last=$(mem)
echo \"CAROM-READY $last\"
while :; do
    now=$(mem)
    if [ $now != $last ]; then
        # Added memory arrives in blocks, one after the other.
        while sleep 0.5; last=$(mem); [ $now != $last ]; do now=$last; done
        wait_for_nvme
        {verify}
        echo \"CAROM-GREW $now\"
    fi
    sleep 0.2
done
"
    )
}

/// Returns the numbers in the complete console lines `KIND KIB`, converted to MiB.
fn figures(vmm: &ApiVmm, kind: &str) -> Vec<u64> {
    let whole = vmm.whole_lines();
    let numbers = whole.lines().filter_map(|line| line.trim().strip_prefix(kind)?.trim().parse::<u64>().ok());
    numbers.map(|kib| kib >> 10).collect()
}

/// Waits for the `number`th console line `KIND KIB`, and returns its number in MiB.
fn wait_for_figure(vmm: &ApiVmm, kind: &str, number: usize) -> u64 {
    let start = Instant::now();
    loop {
        if let Some(mib) = figures(vmm, kind).get(number - 1) {
            return *mib;
        }
        assert!(start.elapsed() < BOOT_TIME, "no line {number} of {kind}:\n{}", vmm.console());
        thread::sleep(Duration::from_millis(100));
    }
}

fn resize(vmm: &ApiVmm, mib: u64) -> (u16, String) {
    let body = json!({"desired_ram": mib * MIB});
    let (status, answer) = vmm.call("PUT", "/api/v1/vm.resize", Some(&body)).unwrap();
    (status, answer.to_string())
}

/// Boots a guest that has 512 MiB of RAM and can get another 512 MiB. With `iommu`, the drive is behind the virtio-iommu.
fn boot(kernel: Kernel, iommu: bool, cmdline: &str, more: Value) -> ApiVmm {
    boot_on(&SITE, kernel, iommu, cmdline, more)
}

fn boot_on(site: &Site, kernel: Kernel, iommu: bool, cmdline: &str, more: Value) -> ApiVmm {
    let vmm = ApiVmm::start_with(site, kernel, &grow_and_work()).unwrap();
    let mut config = json!({
        "memory": {"size": 512 * MIB, "hotplug_size": 512 * MIB},
        // Without this parameter, a user must online added memory.
        "payload": payload(&vmm, &format!(" memhp_default_state=online {cmdline}")),
        "devices": [{"path": Site::sysfs(&SITE.nvme[0]), "iommu": iommu, "id": "drive"}],
    });
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    create_and_boot(&vmm, config);
    vmm.wait_for("CAROM-READY", 1, BOOT_TIME).unwrap();
    vmm
}

fn grows_twice_and_keeps_it_over_a_reboot(kernel: Kernel) {
    let vmm = boot(kernel, true, "", json!({"iommu_bounce": {"size": 16 * MIB}}));
    let booted = wait_for_figure(&vmm, "CAROM-READY", 1);
    for (mib, part) in [
        (576, "which is not a multiple of 128M"),
        (384, "RAM of a running guest cannot shrink"),
        (1152, "leaves room for only 536870912"),
    ] {
        let (status, answer) = resize(&vmm, mib);
        assert!(status == 400 && answer.contains("desired_ram: ") && answer.contains(part), "{status}: {answer}");
    }
    for (round, mib) in [(1, 640), (2, 1024)] {
        assert_eq!(resize(&vmm, mib), (204, "null".into()));
        assert_eq!(info(&vmm)["memory_actual_size"], mib * MIB);
        assert_eq!(wait_for_figure(&vmm, "CAROM-GREW", round) - booted, mib - 512);
        vmm.wait_for("CAROM-VERIFY 0 4194304", round, BOOT_TIME).unwrap();
        let bytes = pinned(&vmm);
        assert!(bytes <= 64 * MIB, "{bytes} bytes are pinned");
    }
    assert!(resize(&vmm, 1152).1.contains("memory.hotplug_size leaves room for only 0"));
    put(&vmm, "vm.reboot", &Value::Null);
    // The rebooted guest has the added memory when its job begins, or soon afterwards.
    let ready = wait_for_figure(&vmm, "CAROM-READY", 2);
    let again = if ready - booted < 512 { wait_for_figure(&vmm, "CAROM-GREW", 3) } else { ready };
    assert_eq!(again - booted, 512);
    end(vmm);
}

#[guest_test]
fn ram_added_with_a_drive_behind_the_iommu_is_not_pinned() {
    grows_twice_and_keeps_it_over_a_reboot(Kernel::Patched);
}

#[guest_test(slow = "the guest with the older kernel does the same")]
fn ram_is_added_to_a_guest_with_the_newer_kernel() {
    grows_twice_and_keeps_it_over_a_reboot(Kernel::Newer);
}

/// Adds 128 MiB and checks that verified I/O succeeds afterwards. Returns by how many bytes the pinned memory grew.
fn grows_and_works(vmm: &ApiVmm) -> u64 {
    let before = pinned(vmm);
    assert_eq!(resize(vmm, 640), (204, "null".into()));
    wait_for_figure(vmm, "CAROM-GREW", 1);
    vmm.wait_for("CAROM-VERIFY 0 4194304", 1, BOOT_TIME).unwrap();
    pinned(vmm) - before
}

#[guest_test]
fn ram_is_added_while_a_drive_maps_all_ram() {
    let vmm = boot(Kernel::Patched, false, "", json!({}));
    assert_eq!(grows_and_works(&vmm), 128 * MIB);
    end(vmm);
}

/// Returns a site whose VMM may lock at most `bytes` bytes and lacks the capability to exceed this limit.
fn site_with_limit(dir: &Path, bytes: u64) -> Site {
    let (carom, limited) = (SITE.carom.display(), dir.join("carom"));
    let caps = "setpriv --bounding-set=-ipc_lock --inh-caps=-ipc_lock";
    fs::write(&limited, format!("#!/bin/sh\nexec prlimit --memlock={bytes} {caps} '{carom}' \"$@\"\n")).unwrap();
    fs::set_permissions(&limited, fs::Permissions::from_mode(0o755)).unwrap();
    Site { carom: limited, ..SITE.clone() }
}

#[guest_test]
fn refused_ram_leaves_room_for_the_drive_and_for_less_ram() {
    let dir = tempfile::tempdir().unwrap();
    let site = site_with_limit(dir.path(), 768 * MIB);
    let vmm = boot_on(&site, Kernel::Patched, false, "", json!({}));
    let before = pinned(&vmm);
    for _ in 0..2 {
        let (status, answer) = resize(&vmm, 1024);
        assert!(status != 204 && answer.contains("limit on locked memory"), "{status}: {answer}");
        assert_eq!((pinned(&vmm), &info(&vmm)["memory_actual_size"]), (before, &json!(512 * MIB)));
    }
    // After the rejections, a drive that is added again can still map all RAM.
    put(&vmm, "vm.remove-device", &json!({"id": "drive"}));
    wait_gone(&vmm, "drive");
    let drive = json!({"path": Site::sysfs(&SITE.nvme[0]), "iommu": false, "id": "drive"});
    let (status, answer) = vmm.call("PUT", "/api/v1/vm.add-device", Some(&drive)).unwrap();
    assert_eq!((status, pinned(&vmm)), (200, before), "{answer}");
    // Adding a smaller amount succeeds after the larger amount was rejected.
    assert_eq!(grows_and_works(&vmm), 128 * MIB);
    end(vmm);
}

#[guest_test(slow = "other tests cover drives that access all RAM, and unit tests cover the domain")]
fn ram_is_added_with_a_drive_in_an_all_ram_domain() {
    let vmm = boot(Kernel::Patched, true, "iommu.passthrough=1", json!({}));
    assert_eq!(grows_and_works(&vmm), 128 * MIB);
    let counters = vmm.call("GET", "/api/v1/vm.counters", None).unwrap().1;
    assert_eq!(counters["_iommu"]["faults"], 0, "{counters}");
    end(vmm);
}

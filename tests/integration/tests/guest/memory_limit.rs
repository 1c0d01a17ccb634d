// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! VMM that the kernel kills, because the VMM's control group has reached its memory limit and cannot swap. Afterwards, all
//! data that the guest has flushed must still exist. The guest's drive must be available immediately, and no memory may stay
//! pinned.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;

use carom_integration::Site;
use carom_integration::api::ApiVmm;
use carom_integration::harness::guest_test;
use carom_integration::host_memory::{DmaMemory, MemoryGroup};
use carom_integration::workload;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::api::BOOT_TIME;
use crate::disk::image;
use crate::hotplug::{create_and_boot, pinned, put};
use crate::killed::{counting, holds, last_told};
use crate::support::{MIB, SITE, qemu_img};

/// Difference between the limit and the memory that the VMM already uses. At the end, the guest fills more memory than this
/// amount.
const ROOM: u64 = 32 * MIB;

/// Returns shell lines that verify I/O on the drive in the background, and fill memory after the power button is pressed.
fn beside() -> String {
    let verify = workload::fio_verify(4, 16);
    format!(
        r#"
dmesg -n 1
presses() {{ awk '/ACPI:Ged/ {{ n += $2 + $3 }} END {{ print n + 0 }}' /proc/interrupts; }}
while :; do
{verify}
done &
(until [ "$(presses)" != 0 ]; do sleep 0.1; done
echo CAROM-FILLS
dd if=/dev/zero of=/filled bs=1M count=256 2>/dev/null
echo CAROM-FILLED) &
"#
    )
}

fn boot(dir: &Path, job: &str, before: impl FnOnce(&ApiVmm)) -> ApiVmm {
    let vmm = ApiVmm::start(&SITE, job).unwrap();
    before(&vmm);
    let disks = json!([
        {"path": dir.join("disk.img"), "num_queues": 2},
        {"path": dir.join("disk.qcow2"), "image_type": "Qcow2", "num_queues": 2},
    ]);
    let drive = json!({"path": Site::sysfs(&SITE.nvme[0]), "iommu": true});
    let cpus = json!({"boot_vcpus": 2, "max_vcpus": 2});
    create_and_boot(
        &vmm,
        json!({"disks": disks, "cpus": cpus, "devices": [drive], "iommu_bounce": {"size": 64 * MIB}}),
    );
    vmm
}

#[guest_test(
    needs(QemuImg),
    slow = "killed::flushed_data_survives_a_killed_vmm covers a killed VMM without a limit",
    by_iommufd
)]
fn vmm_killed_at_its_memory_limit_loses_no_flushed_data() {
    let dir = tempfile::tempdir().unwrap();
    let raw = image(dir.path(), "disk.img");
    let qcow2 = qemu_img::create(dir.path(), "disk.qcow2", crate::disk::SIZE, None);
    let before = DmaMemory::now().unwrap();
    let group = MemoryGroup::new("carom-memory-limit").unwrap();
    let mut vmm = boot(dir.path(), &counting(1, 1, &beside()), |vmm| group.add(vmm.pid()).unwrap());
    vmm.wait_for("CAROM-FLUSHED 20\n", 1, BOOT_TIME).unwrap();
    vmm.wait_for("CAROM-VERIFY 0", 1, BOOT_TIME).unwrap();
    assert!(pinned(&vmm) > 0, "nothing is pinned for the drive");

    group.limit(group.without_a_file().unwrap() + ROOM).unwrap();
    assert_eq!(group.killed().unwrap(), 0, "a process was killed before the guest filled memory");
    put(&vmm, "vm.power-button", &Value::Null);
    let status = vmm.wait(BOOT_TIME).unwrap();

    assert_eq!((status.signal(), group.killed().unwrap()), (Some(Signal::KILL.as_raw()), 1), "{status}");
    let console = vmm.console();
    assert!(console.contains("CAROM-FILLS") && !console.contains("CAROM-FILLED"), "{console}");
    let flushed = last_told(&vmm, "CAROM-FLUSHED");
    assert!(holds(&fs::read(&raw).unwrap(), flushed), "not all of the {flushed} flushed numbers are in the image");
    assert!(holds(&qemu_img::content(&qcow2), flushed), "not all of the {flushed} flushed numbers are in the image");
    before.wait_until_back().unwrap();
    drop((vmm, group));

    // The next VMM can use the disks and the drive.
    let job = format!("{}\n{}", workload::WAIT_FOR_NVME, counting(flushed, 1000, &workload::fio_verify(4, 16)));
    let next = boot(dir.path(), &job, |_| {});
    next.wait_for("CAROM-FLUSHED 1000\n", 1, BOOT_TIME).unwrap();
    assert!(next.console().contains("CAROM-VERIFY 0"), "{}", next.console());
    for disk in ["vda", "vdb"] {
        assert_eq!(last_told(&next, &format!("CAROM-FOUND-{disk}")), flushed);
    }
}

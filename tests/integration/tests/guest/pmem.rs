// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! virtio-pmem: a guest sees a host file as persistent memory. Debian's kernel writes to the memory, flushes it, and releases
//! the device. Drives behind the virtio-iommu do DMA to pages of the file.

use std::fs::{self, File};

use carom_integration::api::ApiVmm;
use carom_integration::harness::guest_test;
use carom_integration::workload::WAIT_FOR_NVME;
use carom_integration::{Guest, Kernel};
use serde_json::json;

use crate::api::BOOT_TIME;
use crate::hotplug::{create_and_boot, end, put, wait_gone};
use crate::support::{MIB, SITE, number, run};

/// Job that waits for three devices. It prints the size of each device, writes to the device and flushes it. The job ends when
/// the third device is removed.
const JOB: &str = "
mark() {
    while [ ! -b /dev/$1 ]; do sleep 0.1; done
    NAME=$(dd if=/dev/$1 bs=16 count=1 2>/dev/null)
    echo CAROM-SIZE $NAME $(cat /sys/block/$1/size)
    printf 'written by the guest' | dd of=/dev/$1 bs=512 seek=1 conv=fsync 2>/dev/null && echo CAROM-FLUSHED $NAME
}
mark pmem0
mark pmem1
echo CAROM-READY
mark pmem2
echo CAROM-PLUGGED
while [ -b /dev/pmem2 ]; do sleep 0.1; done
echo CAROM-UNPLUGGED
";

fn count(vmm: &ApiVmm, device: &str, name: &str) -> u64 {
    let counters = vmm.call("GET", "/api/v1/vm.counters", None).unwrap().1;
    counters[device][name].as_u64().unwrap_or_else(|| panic!("no {device} {name}: {counters}"))
}

#[guest_test(slow = "unit tests cover the device, and disk:: covers hotplug")]
fn pmem_files_keep_what_the_guest_writes_unless_discarded() {
    let mut vmm = ApiVmm::start_with(&SITE, Kernel::Stock, JOB).unwrap();
    let file = |name: &str| {
        let path = vmm.dir().join(name);
        File::create(&path).unwrap().set_len(16 * MIB).unwrap();
        let mut bytes = fs::read(&path).unwrap();
        bytes[..16].copy_from_slice(format!("{name:<16}").as_bytes());
        fs::write(&path, bytes).unwrap();
        path
    };
    let (kept, discarded, plugged) = (file("kept"), file("discarded"), file("plugged"));
    let pmem = json!([
        {"file": kept, "iommu": true, "id": "kept"},
        {"file": discarded, "size": 8 * MIB, "discard_writes": true, "id": "discarded"},
    ]);
    create_and_boot(&vmm, json!({"memory": {"size": 1024 * MIB}, "pmem": pmem}));
    vmm.wait_for("CAROM-READY\n", 1, BOOT_TIME).unwrap();
    let (status, added) =
        vmm.call("PUT", "/api/v1/vm.add-pmem", Some(&json!({"file": plugged, "id": "plugged"}))).unwrap();
    assert_eq!((status, &added["id"]), (200, &json!("plugged")), "{added}");
    vmm.wait_for("CAROM-PLUGGED\n", 1, BOOT_TIME).unwrap();
    // The guest powers off when the third device is removed, and a VM that is shut down has no counters.
    assert!(count(&vmm, "kept", "flushes") > 0 && count(&vmm, "discarded", "flushes") > 0);
    assert_eq!(count(&vmm, "_iommu", "faults"), 0);
    put(&vmm, "vm.remove-device", &json!({"id": "plugged"}));
    wait_gone(&vmm, "plugged");

    let console = vmm.console();
    // The names of the guest's devices depend on the order in which they become ready, so the lines contain the files' names.
    for line in [
        "CAROM-SIZE kept 32768",
        "CAROM-FLUSHED kept",
        "CAROM-SIZE discarded 16384",
        "CAROM-FLUSHED discarded",
        "CAROM-SIZE plugged 32768",
        "CAROM-FLUSHED plugged",
    ] {
        assert!(console.contains(line), "no {line:?}: {console}");
    }
    let written = |path| fs::read(path).unwrap()[512..].starts_with(b"written by");
    assert_eq!((written(&kept), written(&discarded), written(&plugged)), (true, false, true));
    vmm.wait_for("CAROM-JOB-EXIT 0\n", 1, BOOT_TIME).unwrap();
    end(&mut vmm);
}

/// Returns a job that makes each of these drives do direct I/O from and to pages of a file on persistent memory. If the I/O
/// hangs, the job never prints its last line (CAROM-FAULTS).
fn direct_io(drives: &[&str]) -> String {
    let drives = drives.join(" ");
    format!(
        "while [ ! -b /dev/pmem0 ]; do sleep 0.1; done
mke2fs -b 4096 /dev/pmem0 >/dev/null || exit 91
mkdir -p /mnt && mount -t ext4 -o dax /dev/pmem0 /mnt || exit 92
for drive in {drives}; do
    memory-check dax /mnt/$(basename $drive) $drive | sed \"s|^memory-check: |CAROM-CHECKED $drive |\"
done
umount /mnt
dmesg | grep -c 'virtio_iommu.*fault' | sed 's/^/CAROM-FAULTS /'
"
    )
}

/// Number of lines that `memory-check dax` prints per drive.
const DAX_CASES: usize = 5;

/// Checks direct I/O of a virtio disk and an NVMe drive whose buffers are pages of a file on persistent memory.
fn does_direct_io(name: &str, kernel: Kernel, windows: bool) {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| {
        let path = dir.path().join(name);
        File::create(&path).unwrap().set_len(64 * MIB).unwrap();
        path
    };
    let (memory, disk) = (file("memory"), file("disk"));
    let job = format!("{WAIT_FOR_NVME}{}", direct_io(&["/dev/vda", "/dev/nvme0n1"]));
    let mut guest = Guest::new(name)
        .kernel(kernel)
        .memory_mib(1024)
        .cmdline("iommu.strict=1")
        .iommu_device(&SITE.nvme[0])
        .disk(&format!("path={},image_type=raw,iommu=on", disk.display()))
        .arguments(&["--pmem".into(), format!("file={}", memory.display())])
        .job(&job);
    if windows {
        guest = guest.bounce("size=32M");
    }
    let outcome = run(&guest);
    let checked: Vec<&str> = outcome.values("CAROM-CHECKED").collect();
    assert_eq!(checked.len(), 2 * DAX_CASES, "{checked:?}; console:\n{}", outcome.console);
    assert!(checked.iter().all(|line| line.ends_with(": right")), "{checked:?}");
    assert_eq!(number(&outcome, "CAROM-FAULTS"), 0, "console:\n{}", outcome.console);
}

#[guest_test(by_iommufd)]
fn direct_io_reaches_pages_of_a_dax_file() {
    does_direct_io("pmem-dax", Kernel::Patched, false);
}

#[guest_test(slow = "direct_io_reaches_pages_of_a_dax_file_on_the_newer_kernel covers windows, too")]
fn direct_io_reaches_pages_of_a_dax_file_with_windows() {
    does_direct_io("pmem-dax-windows", Kernel::Patched, true);
}

#[guest_test]
fn direct_io_reaches_pages_of_a_dax_file_on_the_newer_kernel() {
    does_direct_io("pmem-dax-newer", Kernel::Newer, true);
}

#[guest_test(slow = "direct_io_reaches_pages_of_a_dax_file covers a kernel that boots faster")]
fn direct_io_of_a_stock_kernel_reaches_pages_of_a_dax_file() {
    does_direct_io("pmem-dax-stock", Kernel::Stock, false);
}

/// Checks a guest program that maps registers of its vfio-pci drive for DMA, as a VMM in the guest does for its own guest.
fn maps_a_bar(name: &str, kernel: Kernel) {
    let job = format!(
        "{WAIT_FOR_NVME}echo \"$NVME\" >/sys/bus/pci/drivers/nvme/unbind
echo 1 >/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts
echo vfio-pci >\"/sys/bus/pci/devices/$NVME/driver_override\"
echo \"$NVME\" >/sys/bus/pci/drivers_probe
group=$(basename \"$(readlink \"/sys/bus/pci/devices/$NVME/iommu_group\")\")
memory-check bar \"$group\" \"$NVME\" | sed 's|^memory-check: |CAROM-CHECKED |'
"
    );
    let outcome = run(&Guest::new(name).kernel(kernel).iommu_device(&SITE.nvme[0]).job(&job));
    let checked: Vec<&str> = outcome.values("CAROM-CHECKED").collect();
    assert_eq!(checked.len(), 3, "{checked:?}; console:\n{}", outcome.console);
    assert!(checked.iter().all(|line| line.ends_with(": right")), "{checked:?}");
}

#[guest_test]
fn program_with_a_drive_by_vfio_maps_its_registers() {
    maps_a_bar("bar-vfio", Kernel::Patched);
}

#[guest_test(slow = "program_with_a_drive_by_vfio_maps_its_registers covers the other kernel")]
fn vfio_program_maps_its_drives_registers_on_newer_kernel() {
    maps_a_bar("bar-vfio-newer", Kernel::Newer);
}

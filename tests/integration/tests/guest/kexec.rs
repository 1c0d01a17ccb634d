// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest that starts another kernel while devices do DMA: by kexec, and by kdump after a panic.

use carom_integration::api::ApiVmm;
use carom_integration::harness::guest_test;
use carom_integration::workload::{self, WAIT_FOR_NVME};
use carom_integration::{Kernel, Site};
use serde_json::json;

use crate::api::BOOT_TIME;
use crate::disk::image;
use crate::hotplug::{create_and_boot, end, payload};
use crate::support::{MIB, SITE};

/// Shell function that starts endless reads of the drive and of the disk, each at depth 16. The function returns when the drive
/// and the disk have each completed 200 reads.
const LOAD: &str = "
load() {
    for disk in nvme0n1 vda; do
        fio --name=load --filename=/dev/$disk --direct=1 --rw=randread --ioengine=libaio --iodepth=16 \\
            --bssplit=4k/50:64k/50 --size=16M --time_based --runtime=1000 >/dev/null 2>&1 &
    done
    for disk in nvme0n1 vda; do
        while [ \"$(awk '{ print $1 }' /sys/block/$disk/stat)\" -lt 200 ]; do sleep 0.1; done
    done
}
";

/// Returns shell lines that write and verify the drive and the disk, twice each.
fn verify_both() -> String {
    let both = ["/dev/nvme0n1", "/dev/vda"].map(|disk| workload::fio_verify_on(disk, 4, 16)).concat();
    format!("{both}{both}")
}

/// Boots a VM with a passed-through drive and a disk, both behind the virtio-iommu. `parameters` are additional kernel
/// parameters.
fn boot(kernel: Kernel, parameters: &str, job: &str) -> ApiVmm {
    let vmm = ApiVmm::start_with_its_kernel(&SITE, kernel, &format!("{WAIT_FOR_NVME}{LOAD}{job}")).unwrap();
    let disk = image(vmm.dir(), "disk.img");
    create_and_boot(
        &vmm,
        json!({
            "payload": payload(&vmm, &format!(" retain_initrd {parameters}")),
            "cpus": {"boot_vcpus": 2, "max_vcpus": 2},
            "memory": {"size": 1024 * MIB},
            "devices": [{"path": Site::sysfs(&SITE.nvme[0]), "iommu": true, "id": "drive"}],
            "disks": [{"path": disk, "iommu": true, "id": "disk"}],
            "iommu_bounce": {"size": 16 * MIB},
        }),
    );
    vmm
}

/// Waits until the second kernel has verified the drive and the disk, and ends the VMM.
fn finish(mut vmm: ApiVmm) {
    vmm.wait_for("CAROM-SECOND-DONE\n", 1, BOOT_TIME).unwrap();
    let console = vmm.console();
    assert_eq!(console.matches("CAROM-VERIFY 0 4194304").count(), 4, "{console}");
    assert!(!console.contains("CAROM-DAMAGED"), "{console}");
    end(&mut vmm);
}

fn kexec_under_load(kernel: Kernel) {
    let verify = verify_both();
    let job = format!(
        r#"
if grep -q carom-second /proc/cmdline; then
    # A device that still writes for the first kernel would change this file.
    dd if=/dev/urandom of=/kept bs=1M count=64 2>/dev/null
    sum=$(md5sum </kept)
    {verify}
    [ "$(md5sum </kept)" = "$sum" ] || echo CAROM-DAMAGED
    echo CAROM-SECOND-DONE
    exec sleep 1000
fi
cp /sys/firmware/initrd /tmp/initrd
kexec-load /bin/kernel /tmp/initrd "$(cat /proc/cmdline) carom-second" || exit 91
load
echo CAROM-KEXEC
kexec-load -e
"#
    );
    finish(boot(kernel, "", &job));
}

#[guest_test]
fn kexec_under_load_finds_working_devices() {
    kexec_under_load(Kernel::Patched);
}

#[guest_test(slow = "kexec_under_load_finds_working_devices covers the other kernel")]
fn kexec_under_load_finds_working_devices_newer() {
    kexec_under_load(Kernel::Newer);
}

fn kdump_under_load(kernel: Kernel) {
    let verify = verify_both();
    let job = format!(
        r#"
if [ -e /proc/vmcore ]; then
    dd if=/proc/vmcore bs=4 count=1 2>/dev/null | grep -q ELF && echo CAROM-VMCORE-ELF
    grep -a -q -m 1 "OSRELEASE=$(uname -r)" /proc/vmcore && echo CAROM-VMCORE-INFO
    {verify}
    echo CAROM-SECOND-DONE
    exec sleep 1000
fi
cp /sys/firmware/initrd /tmp/initrd
kexec-load -p /bin/kernel /tmp/initrd "$(sed 's/crashkernel=[^ ]*//' /proc/cmdline) nr_cpus=1 reset_devices" || exit 91
load
echo CAROM-CRASH
echo c >/proc/sysrq-trigger
"#
    );
    let vmm = boot(kernel, "crashkernel=320M", &job);
    for line in ["CAROM-VMCORE-ELF\n", "CAROM-VMCORE-INFO\n"] {
        vmm.wait_for(line, 1, BOOT_TIME).unwrap();
    }
    finish(vmm);
}

#[guest_test(slow = "kexec_under_load_finds_working_devices covers DMA in flight")]
fn kdump_with_dma_in_flight_reads_the_old_memory() {
    kdump_under_load(Kernel::Patched);
}

#[guest_test(slow = "kdump_with_dma_in_flight_reads_the_old_memory covers the other kernel")]
fn kdump_with_dma_in_flight_reads_the_old_memory_newer() {
    kdump_under_load(Kernel::Newer);
}

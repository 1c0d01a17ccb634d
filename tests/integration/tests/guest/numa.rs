// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest with two NUMA nodes. The guest's RAM consists of memory zones, and the VMM's threads run on selected CPUs.

use std::fs::{self, File};

use carom_integration::Site;
use carom_integration::api::ApiVmm;
use carom_integration::harness::guest_test;
use carom_integration::workload::{self, WAIT_FOR_NVME};
use serde_json::{Value, json};

use crate::api::BOOT_TIME;
use crate::disk::image;
use crate::hotplug::{create_and_boot, put};
use crate::support::{MIB, SITE};

/// Returns the host CPUs that the VMM's thread with this name may run on.
fn place(vmm: &ApiVmm, thread: &str) -> String {
    for task in fs::read_dir(format!("/proc/{}/task", vmm.pid())).unwrap() {
        let status = fs::read_to_string(task.unwrap().path().join("status")).unwrap_or_default();
        let field = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default().trim();
        if field("Name:") == thread {
            return field("Cpus_allowed_list:").into();
        }
    }
    panic!("there is no thread {thread}");
}

#[guest_test(
    slow = "vmm/tests/zones.rs covers zones, unit tests cover nodes, and vcpus:: covers threads on their CPUs"
)]
fn two_node_guest_in_ram_zones_does_io_with_and_without_iommu() {
    let (drive, disk) = (workload::fio_verify(8, 32), workload::fio_verify_on("/dev/vda", 8, 32));
    // The job fills 200 MB of memory, so that the guest uses several zones.
    let job = format!(
        "{WAIT_FOR_NVME}
cd /sys/devices/system/node
echo \"CAROM-NODES $(ls -d node? | tr '\\n' ' ')cpus $(cat node1/cpulist) distance $(cat node0/distance)\"
echo \"CAROM-NODE-KIB $(awk '/MemTotal/ {{ print $4 }}' node1/meminfo)\"
head -c 200000000 /dev/urandom >/tmp/much
sum=$(md5sum </tmp/much)
{drive}
{disk}
[ \"$(md5sum </tmp/much)\" = \"$sum\" ] && echo CAROM-RAM same
echo CAROM-DONE
sleep 1000
"
    );
    let vmm = ApiVmm::start(&SITE, &job).unwrap();
    let ram = vmm.dir().join("ram");
    File::create_new(&ram).unwrap().set_len(128 * MIB).unwrap();
    let affinity = |what: &str, number: u32, cpu: u32| json!({what: number, "host_cpus": [cpu]});
    let config = json!({
        "cpus": {"boot_vcpus": 2, "max_vcpus": 2, "affinity": [affinity("vcpu", 0, 1), affinity("vcpu", 1, 0)]},
        "memory": {"size": 0, "zones": [
            {"id": "near", "size": 256 * MIB, "reserve": true},
            {"id": "file", "size": 128 * MIB, "file": ram, "shared": true},
            {"id": "far", "size": 192 * MIB, "host_numa_node": 0},
        ]},
        "numa": [
            {"guest_numa_id": 0, "cpus": [0], "memory_zones": ["near", "file"], "distances": [{"destination": 1, "distance": 30}]},
            {"guest_numa_id": 1, "cpus": [1], "memory_zones": ["far"]},
        ],
        "devices": [{"path": Site::sysfs(&SITE.nvme[0]), "iommu": true, "pci_device_id": 9}],
        "disks": [{"path": image(vmm.dir(), "disk.img"), "id": "disk", "num_queues": 2,
            "queue_affinity": [affinity("queue_index", 0, 1), affinity("queue_index", 1, 0)]}],
        "iommu_bounce": {"size": 32 * MIB},
    });
    create_and_boot(&vmm, config);
    vmm.wait_for("CAROM-DONE", 1, BOOT_TIME * 2).unwrap();

    let console = vmm.console();
    assert!(console.contains("CAROM-NODES node0 node1 cpus 1 distance 10 30"), "{console}");
    let kib: u64 = console.split("CAROM-NODE-KIB ").nth(1).unwrap().split_whitespace().next().unwrap().parse().unwrap();
    assert!((150 << 10..=192 << 10).contains(&kib), "the second node has {kib} KiB");
    assert_eq!(
        (console.matches("CAROM-VERIFY 0").count(), console.matches("CAROM-RAM same").count()),
        (2, 1),
        "{console}"
    );
    let places = ["vcpu0", "vcpu1", "disk_q0", "disk_q1"].map(|thread| place(&vmm, thread));
    assert_eq!(places, ["1", "0", "1", "0"]);
    let info = vmm.call("GET", "/api/v1/vm.info", None).unwrap().1;
    assert_eq!(info["device_tree"]["_vfio0"]["pci_bdf"], "0000:00:09.0", "{info}");
    let used = fs::read(&ram).unwrap().chunks(4096).filter(|page| page.iter().any(|byte| *byte != 0)).count();
    assert!(used > 0, "the guest did not use the zone with the file");
    put(&vmm, "vmm.shutdown", &Value::Null);
}

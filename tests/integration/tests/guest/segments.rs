// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! PCI segments with more devices than one bus can have. Devices are hotplugged on two segments, and all devices of one segment
//! are behind the virtio-iommu.

use std::fs::File;
use std::path::Path;

use carom_integration::api::ApiVmm;
use carom_integration::harness::guest_test;
use carom_integration::workload;
use serde_json::{Value, json};

use crate::api::BOOT_TIME;
use crate::hotplug::{create_and_boot, go_on_in_another_process, info, payload, put, wait_gone};
use crate::support::{MIB, SITE};

/// Number of disks on each segment at boot. Later, the second and the third segment get one more disk each.
const DISKS: [usize; 3] = [14, 13, 11];
/// Size of an image, in bytes.
const SIZE: u64 = 16 * MIB;

fn image(dir: &Path, name: &str) -> String {
    let path = dir.join(name);
    File::create_new(&path).unwrap().set_len(SIZE).unwrap();
    path.display().to_string()
}

/// Returns a job that counts the functions of each segment, verifies I/O on the disk `work`, and reads each disk that is added
/// later.
fn job() -> String {
    let verify = workload::fio_verify_on("/dev/$name", 4, 16);
    format!(
        r#"
disk() {{ grep -lx "$1" /sys/block/vd*/serial 2>/dev/null | cut -d/ -f4; }}
address() {{ basename "$(readlink -f "/sys/block/$1/device/..")"; }}
for segment in 0000 0001 0002; do
    echo "CAROM-FUNCTIONS $segment $(ls -d /sys/bus/pci/devices/$segment:* | wc -l)"
done
echo "CAROM-DISKS $(ls -d /sys/block/vd* | wc -l)"
sizes=0
for size in /sys/block/vd*/size; do
    dd if=/dev/$(echo $size | cut -d/ -f4) of=/dev/null bs=4k count=1 iflag=direct 2>/dev/null && sizes=$((sizes + 1))
done
echo "CAROM-READABLE $sizes"
name=$(disk work)
echo "CAROM-WORK $(address $name) $(cat /sys/bus/pci/devices/$(address $name)/iommu_group/type)"
echo "CAROM-BESIDE $(ls -d /sys/bus/pci/devices/000[01]:*/iommu_group 2>/dev/null | wc -l)"
{verify}
for late in late1 late2; do
    (while :; do
        until name=$(disk $late) && [ -n "$name" ]; do sleep 0.1; done
        at=$(address $name)
        dd if=/dev/$name of=/dev/null bs=64k count=16 iflag=direct 2>/dev/null &&
            echo "CAROM-CAME $late $at $(cat /sys/bus/pci/devices/$at/iommu_group/type 2>/dev/null || echo direct)"
        while [ -e "/sys/bus/pci/devices/$at" ]; do sleep 0.1; done
        echo "CAROM-GONE $late"
    done) &
done
echo CAROM-READY
wait
"#
    )
}

#[guest_test(slow = "unit tests cover segments, and disk:: covers hotplug")]
fn forty_devices_on_three_segments_work_and_are_restored() {
    let mut vmm = ApiVmm::start(&SITE, &job()).unwrap();
    let shared = image(vmm.dir(), "shared.img");
    let mut disks = Vec::new();
    for (segment, count) in DISKS.into_iter().enumerate() {
        for number in 0..count {
            let id = format!("d{segment}_{number}");
            disks.push(json!({"path": shared, "readonly": true, "pci_segment": segment, "id": id}));
        }
    }
    // Replace the last disk of the third segment by the disk that the job writes to.
    let work = json!({"path": image(vmm.dir(), "work.img"), "pci_segment": 2, "id": "work"});
    *disks.last_mut().unwrap() = work;
    create_and_boot(
        &vmm,
        json!({
            "payload": payload(&vmm, " iommu.bounce=all"),
            "platform": {"num_pci_segments": 3, "iommu_segments": [2]},
            "pci_segments": [{"pci_segment": 1, "mmio32_aperture_weight": 2}],
            "iommu_bounce": {"size": 64 * MIB},
            "disks": disks,
        }),
    );
    vmm.wait_for("CAROM-READY", 1, BOOT_TIME).unwrap();

    // The counts include the host bridges, and the virtio-iommu on the first segment.
    let console = vmm.console();
    for said in [
        "CAROM-FUNCTIONS 0000 16\n",
        "CAROM-FUNCTIONS 0001 14\n",
        "CAROM-FUNCTIONS 0002 12\n",
        "CAROM-DISKS 38\n",
        "CAROM-READABLE 38\n",
        "CAROM-WORK 0002:00:0b.0 DMA\n",
        "CAROM-BESIDE 0\n",
        "CAROM-VERIFY 0 4194304\n",
    ] {
        assert!(console.contains(said), "no {said}: {console}");
    }
    let reported = info(&vmm);
    assert_eq!(reported["device_tree"]["d1_0"]["pci_bdf"], "0001:00:12.0");
    assert_eq!(reported["device_tree"]["work"]["pci_bdf"], "0002:00:0b.0");
    assert!(
        reported["config"]["disks"].as_array().unwrap().iter().all(|disk| disk["iommu"] == (disk["pci_segment"] == 2))
    );
    let counters = vmm.call("GET", "/api/v1/vm.counters", None).unwrap().1;
    let iommu = &counters["_iommu"];
    assert!(iommu["requests_window_add"].as_u64().unwrap() > 0 && iommu["faults"] == 0, "{counters}");
    let windows = vmm.call("GET", "/api/v1/vm.iommu-bounce", None).unwrap().1;
    let endpoints: Vec<&Value> = windows["windows"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|window| window["endpoints"].as_array().unwrap())
        .collect();
    assert!(endpoints.contains(&&json!("0002:00:0b.0")), "{windows}");

    let late =
        |number: usize| json!({"path": shared, "readonly": true, "pci_segment": number, "id": format!("late{number}")});
    for (number, address, dma) in [(1, "0001:00:1f.0", "direct"), (2, "0002:00:0c.0", "DMA")] {
        let (status, added) = vmm.call("PUT", "/api/v1/vm.add-disk", Some(&late(number))).unwrap();
        assert_eq!((status, &added["bdf"]), (200, &json!(address)), "{added}");
        vmm.wait_for(&format!("CAROM-CAME late{number} {address} {dma}\n"), 1, BOOT_TIME).unwrap();
    }
    for (segment, why) in
        [(1, "at most 14 devices with iommu off fit"), (3, "segment 3 does not exist: the last segment is 2")]
    {
        let more = json!({"path": shared, "readonly": true, "pci_segment": segment});
        let (status, refused) = vmm.call("PUT", "/api/v1/vm.add-disk", Some(&more)).unwrap();
        assert!(status == 400 && refused.to_string().contains(why), "{status} {refused}");
    }
    put(&vmm, "vm.remove-device", &json!({"id": "late1"}));
    vmm.wait_for("CAROM-GONE late1\n", 1, BOOT_TIME).unwrap();
    wait_gone(&vmm, "late1");

    // The devices keep their addresses when another process restores the VM.
    let before = info(&vmm)["device_tree"].clone();
    go_on_in_another_process(&mut vmm, "snapshot");
    assert_eq!(info(&vmm)["device_tree"], before);
    put(&vmm, "vm.remove-device", &json!({"id": "late2"}));
    vmm.wait_for("CAROM-GONE late2\n", 1, BOOT_TIME).unwrap();
    wait_gone(&vmm, "late2");
    let (status, added) = vmm.call("PUT", "/api/v1/vm.add-disk", Some(&late(2))).unwrap();
    assert_eq!((status, &added["bdf"]), (200, &json!("0002:00:0c.0")), "{added}");
    vmm.wait_for("CAROM-CAME late2 0002:00:0c.0 DMA\n", 1, BOOT_TIME).unwrap();
    put(&vmm, "vmm.shutdown", &Value::Null);
}

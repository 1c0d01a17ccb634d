// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! VMM that is killed while its guest writes to raw and qcow2 images. The images must contain all data that the guest had
//! flushed.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use carom_integration::Site;
use carom_integration::api::ApiVmm;
use carom_integration::harness::{guest_test, tell};
use carom_integration::workload::WAIT_FOR_NVME;
use serde_json::{Value, json};

use crate::api::BOOT_TIME;
use crate::disk::{SIZE, counters, image};
use crate::hotplug::{create, create_and_boot, put};
use crate::support::{MIB, SITE, qemu_img};

/// Distance between the places of two consecutive numbers on the disk, in sectors. This is two qcow2 clusters, so each number
/// needs a new cluster.
const APART: u64 = 256;

/// Number of places for numbers, all in the first half of the disk. Later numbers overwrite earlier numbers, beginning at the
/// first place.
const PLACES: u64 = SIZE / 2 / 512 / APART;

/// Returns the first sector of a number's place.
fn sector(number: u64) -> u64 {
    number % PLACES * APART
}

/// Returns a job that first prints the number in the place of `wanted` on both disks. Then the job writes increasing numbers
/// from `from` on. It writes each number to both disks, flushes it, and prints it. The shell lines in `beside` run before the writes.
/// They may start programs that run during the writes.
pub(crate) fn counting(wanted: u64, from: u64, beside: &str) -> String {
    format!(
        r#"
for disk in vda vdb; do
    echo "CAROM-FOUND-$disk $(dd if=/dev/$disk bs=512 skip={} count=1 iflag=direct 2>/dev/null | head -n 1)"
done
{beside}
i={from}
while :; do
    for disk in vda vdb; do
        {{ echo $i; cat /dev/zero; }} |
            dd of=/dev/$disk bs=512 count=1 seek=$((i % {PLACES} * {APART})) iflag=fullblock conv=fsync,notrunc 2>/dev/null || exit 93
    done
    echo "CAROM-FLUSHED $i"
    i=$((i + 1))
done
"#,
        sector(wanted)
    )
}

/// Returns the number in the last complete console line that begins with `kind`.
pub(crate) fn last_told(vmm: &ApiVmm, kind: &str) -> u64 {
    let whole = vmm.whole_lines();
    let mut reported = whole.lines().filter_map(|line| line.trim().strip_prefix(kind)?.trim().parse().ok());
    reported.next_back().unwrap_or_else(|| panic!("no {kind}:\n{whole}"))
}

fn boot(disks: &[Value], job: &str) -> ApiVmm {
    let vmm = ApiVmm::start(&SITE, job).unwrap();
    create_and_boot(&vmm, json!({"disks": disks, "cpus": {"boot_vcpus": 2, "max_vcpus": 2}}));
    vmm
}

/// Kills the VMM after its guest has reported that it flushed `number`. Returns the last reported number.
fn kill(mut vmm: ApiVmm, number: u64) -> u64 {
    vmm.wait_for(&format!("CAROM-FLUSHED {number}\n"), 1, BOOT_TIME).unwrap();
    let killed = Command::new("kill").args(["-KILL", &vmm.pid().to_string()]).status().unwrap();
    assert!(killed.success() && !vmm.wait(BOOT_TIME).unwrap().success());
    last_told(&vmm, "CAROM-FLUSHED")
}

/// True if a disk contains the numbers up to `flushed`. The next number may already have replaced the oldest number.
pub(crate) fn holds(content: &[u8], flushed: u64) -> bool {
    let oldest = (flushed + 2).saturating_sub(PLACES).max(1);
    (oldest..=flushed).all(|number| {
        let start = usize::try_from(sector(number) * 512).unwrap();
        content[start..].starts_with(format!("{number}\n").as_bytes())
    })
}

#[guest_test(needs(QemuImg))]
fn flushed_data_survives_a_killed_vmm() {
    let dir = tempfile::tempdir().unwrap();
    let raw = image(dir.path(), "disk.img");
    let qcow2 = qemu_img::create(dir.path(), "disk.qcow2", SIZE, None);
    let disks = [json!({"path": raw, "num_queues": 2}), json!({"path": qcow2, "image_type": "Qcow2", "num_queues": 2})];

    let flushed = kill(boot(&disks, &counting(1, 1, "")), 40);

    assert!(holds(&fs::read(&raw).unwrap(), flushed), "not all of the {flushed} flushed numbers are in the image");
    // Data that the VMM had not written yet is lost. In the qcow2 image, the only permitted damage is leaked clusters.
    println!("{:?} with {flushed} numbers", qemu_img::check(&qcow2));
    assert!(holds(&qemu_img::content(&qcow2), flushed), "not all of the {flushed} flushed numbers are in the image");
    // The kernel has released the killed VMM's locks on the images, so another VMM can use the images.
    let next = boot(&disks, &counting(flushed, 1000, ""));
    next.wait_for("CAROM-FLUSHED 1000\n", 1, BOOT_TIME).unwrap();
    for disk in ["vda", "vdb"] {
        assert_eq!(last_told(&next, &format!("CAROM-FOUND-{disk}")), flushed);
    }
}

/// Shell lines that start repeated writes and discards in the second half of the second disk.
const WRITE_AND_DISCARD: &str = "
fio --name=beside --filename=/dev/vdb --offset=32M --size=32M --direct=1 --rw=randwrite --ioengine=libaio --iodepth=16 \
    --bssplit=512/20:4k/30:64k/30:128k/20 --fsync=8 --time_based --runtime=1000 >/tmp/beside 2>&1 &
while blkdiscard -o $((40 << 20)) -l $((8 << 20)) /dev/vdb; do sleep 0.2; done &
";

/// Waits until the second disk has served many requests, and returns its counters. Flushed numbers on the console do not prove
/// this, because the guest may print them before fio has begun.
fn worked(vmm: &ApiVmm) -> Value {
    let start = Instant::now();
    loop {
        let counted = counters(vmm, "_disk1");
        if counted["discards"] != 0 && counted["write_bytes"].as_u64().unwrap() > 4 * MIB {
            return counted;
        }
        assert!(start.elapsed() < BOOT_TIME, "{counted}");
        thread::sleep(Duration::from_millis(100));
    }
}

#[guest_test(needs(QemuImg), slow = "flushed_data_survives_a_killed_vmm covers one killed VMM")]
fn qcow2_images_are_sound_however_often_the_vmm_is_killed() {
    let dir = tempfile::tempdir().unwrap();
    let _behind = image(dir.path(), "behind.img");
    let images = [
        qemu_img::create(dir.path(), "plain.qcow2", SIZE, None),
        qemu_img::create(dir.path(), "front.qcow2", SIZE, Some("behind.img")),
    ];
    let disks = images
        .each_ref()
        .map(|image| json!({"path": image, "image_type": "Qcow2", "backing_files": true, "num_queues": 2}));
    let mut flushed = 0;
    for round in 0..8 {
        let first = flushed + 1;
        let vmm = boot(&disks, &counting(flushed, first, WRITE_AND_DISCARD));

        let last = first + 15 + 7 * round;
        vmm.wait_for(&format!("CAROM-FLUSHED {last}\n"), 1, BOOT_TIME).unwrap();
        let counted = worked(&vmm);
        assert_eq!(counted["errors"], 0, "{counted}");

        let next = kill(vmm, last);

        for image in &images {
            let checked = qemu_img::check(image);
            tell(&format!("{}: {checked:?}, {next} numbers, {counted}", image.display()));
            assert!(
                holds(&qemu_img::content(image), next),
                "{round}: not all of the {next} flushed numbers are in the image"
            );
        }
        flushed = next;
    }
}

/// Job that reads a drive until the VM ends.
const READ_FOR_EVER: &str = "
(while dd if=/dev/nvme0n1 of=/dev/null iflag=direct bs=64k; do :; done) 2>/dev/null &
echo CAROM-READING
wait
";

#[guest_test(slow = "vmm/tests/released.rs covers images, interfaces and sockets of killed VMMs")]
fn device_of_a_killed_vmm_is_free_at_once() {
    let job = format!("{WAIT_FOR_NVME}\n{READ_FOR_EVER}");
    let device = json!({"path": Site::sysfs(&SITE.nvme[0]), "iommu": true});
    for _ in 0..3 {
        let mut vmm = ApiVmm::start(&SITE, &job).unwrap();
        create(&vmm, json!({"devices": [device], "iommu_bounce": {"size": 64 * MIB}}));
        // This fails if another process still uses the device.
        put(&vmm, "vm.boot", &Value::Null);
        vmm.wait_for("CAROM-READING\n", 1, BOOT_TIME).unwrap();
        let killed = Command::new("kill").args(["-KILL", &vmm.pid().to_string()]).status().unwrap();
        assert!(killed.success() && !vmm.wait(BOOT_TIME).unwrap().success());
    }
}

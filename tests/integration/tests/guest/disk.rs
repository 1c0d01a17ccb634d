// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! virtio-blk: disks of raw images in a real guest. Three cases are tested: the disk is not behind the virtio-iommu, is behind
//! it without windows, or is behind it with a window.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use carom_integration::api::ApiVmm;
use carom_integration::harness::guest_test;
use carom_integration::workload;
use carom_integration::{Guest, Outcome};
use serde_json::{Value, json};

use crate::api::BOOT_TIME;
use crate::hotplug::{create_and_boot, end, go_on_in_another_process, info, put, wait_gone};
use crate::support::block_device::LoopDevice;
use crate::support::{MIB, SITE, number, run};

/// Size of the images, in bytes.
pub(crate) const SIZE: u64 = 64 * MIB;

/// Offset in MiB at which a guest writes the numbers from 1 to [`NUMBERS`], one per line.
pub(crate) const NUMBERS_AT: u64 = 32;

/// Last number that a guest writes at [`NUMBERS_AT`].
pub(crate) const NUMBERS: u32 = 200_000;

/// Creates an empty image.
pub(crate) fn image(dir: &Path, name: &str) -> PathBuf {
    let path = dir.join(name);
    File::create_new(&path).unwrap().set_len(SIZE).unwrap();
    path
}

/// Returns the numbers that a guest writes.
pub(crate) fn numbers() -> Vec<u8> {
    (1..=NUMBERS).flat_map(|number| format!("{number}\n").into_bytes()).collect()
}

fn holds_the_numbers(image: &Path) {
    let wanted = numbers();
    let mut bytes = vec![0; wanted.len()];
    File::open(image).unwrap().read_exact_at(&mut bytes, NUMBERS_AT * MIB).unwrap();
    assert!(bytes == wanted, "what the guest wrote is not in the image");
}

/// Returns a job that prints properties of the disk, runs verified I/O, and writes the numbers.
pub(crate) fn work() -> String {
    let verify = workload::fio_verify_on("/dev/vda", 16, 32);
    format!(
        "echo \"CAROM-SECTORS $(cat /sys/block/vda/size)\"
echo \"CAROM-SERIAL $(cat /sys/block/vda/serial)\"
echo \"CAROM-QUEUES $(ls /sys/block/vda/mq | wc -l)\"
{verify}
seq 1 {NUMBERS} | dd of=/dev/vda bs=1M seek={NUMBERS_AT} conv=fsync 2>/dev/null || exit 92
echo CAROM-MARK disk
sleep 0.5
"
    )
}

/// Runs a guest that works with a disk on `image`. `more` contains additional options of the disk.
fn works(guest: Guest, image: &Path, more: &str) -> Outcome {
    let disk = format!("path={},serial=carom-17{more}", image.display());
    let outcome = run(&guest.cpus(2).disk(&disk).job(&work()));
    assert_eq!(number(&outcome, "CAROM-SECTORS"), SIZE / 512);
    assert_eq!(outcome.value("CAROM-SERIAL").unwrap(), "carom-17");
    workload::check_verified(&outcome, 1).unwrap_or_else(|error| panic!("{error:#}"));
    outcome
}

#[guest_test]
fn io_on_disk_without_iommu_is_verified_and_in_the_image() {
    let dir = tempfile::tempdir().unwrap();
    let image = image(dir.path(), "disk.img");

    let outcome = works(Guest::new("disk-beside"), &image, "");

    assert_eq!(number(&outcome, "CAROM-QUEUES"), 1);
    assert!(outcome.counters.is_empty(), "the VM has a virtio-iommu, but needs none");
    holds_the_numbers(&image);
}

#[guest_test(
    slow = "rng:: covers mappings, unit tests cover direct I/O, disk_behind_the_iommu_is_served_through_a_window covers the rest"
)]
fn direct_io_disk_with_two_queues_behind_iommu_uses_mappings() {
    let dir = tempfile::tempdir().unwrap();
    let image = image(dir.path(), "disk.img");
    let device = LoopDevice::new(&image);

    let guest = Guest::new("disk-mapped").cmdline("iommu.strict=1");
    let outcome = works(guest, &device.0, ",iommu=on,direct=on,num_queues=2");

    assert_eq!(number(&outcome, "CAROM-QUEUES"), 2);
    let host = outcome.counters.last().expect("the mark made the VMM report its counters");
    assert!(host.requests.maps() > 500 && host.requests.unmap > 500, "not every buffer was mapped: {host:?}");
    assert_eq!((host.faults, host.window_bytes), (0, 0));
    drop(device);
    holds_the_numbers(&image);
}

#[guest_test]
fn disk_behind_the_iommu_is_served_through_a_window() {
    let dir = tempfile::tempdir().unwrap();
    let image = image(dir.path(), "disk.img");

    let guest = Guest::new("disk-window").cmdline("iommu.strict=1").bounce("size=64M");
    let outcome = works(guest, &image, ",iommu=on");

    let host = outcome.counters.last().expect("the mark made the VMM report its counters");
    assert!(host.requests.window_add > 0 && host.peak_window_bytes > 0, "the disk had no window: {host:?}");
    // fio alone sends more than 500 requests to the disk. Without a window, the guest would map the buffer of each request.
    assert!(host.requests.maps() < 250, "small buffers did not use the window: {host:?}");
    assert_eq!(host.faults, 0);
    holds_the_numbers(&image);
}

#[guest_test(slow = "unit tests cover a driver that writes anyway")]
fn guest_reads_a_disk_that_is_read_only_and_cannot_write_it() {
    let dir = tempfile::tempdir().unwrap();
    let image = image(dir.path(), "disk.img");
    File::options().write(true).open(&image).unwrap().write_all_at(&numbers(), NUMBERS_AT * MIB).unwrap();
    let before = fs::read(&image).unwrap();
    let job = format!(
        "echo \"CAROM-READ-ONLY $(cat /sys/block/vda/ro)\"
dd if=/dev/vda bs=1M skip={NUMBERS_AT} count=2 2>/dev/null | head -n {NUMBERS} >/tmp/read
seq 1 {NUMBERS} | cmp -s - /tmp/read && echo CAROM-SAME 1 || echo CAROM-SAME 0
dd if=/dev/zero of=/dev/vda bs=4k count=1 seek=8192 conv=fsync,notrunc 2>/dev/null && echo CAROM-WROTE 1 || echo CAROM-WROTE 0
"
    );

    let disk = format!("path={},readonly=on", image.display());
    let outcome = run(&Guest::new("disk-read-only").disk(&disk).job(&job));

    assert_eq!(number(&outcome, "CAROM-READ-ONLY"), 1);
    assert_eq!(number(&outcome, "CAROM-SAME"), 1);
    assert_eq!(number(&outcome, "CAROM-WROTE"), 0);
    assert!(fs::read(&image).unwrap() == before, "the image was changed");
}

/// Returns the disk's counters.
pub(crate) fn counters(vmm: &ApiVmm, id: &str) -> Value {
    let (status, counters) = vmm.call("GET", "/api/v1/vm.counters", None).unwrap();
    assert_eq!(status, 200, "{counters}");
    counters[id].clone()
}

/// Returns a job that uses the disk each time it is added: it runs verified I/O, and then reads until the disk is removed.
/// Meanwhile, it prints each new size of the disk.
fn use_whenever_there() -> String {
    let verify = workload::fio_verify_on("/dev/vda", 4, 16);
    format!(
        "echo CAROM-READY
n=0
while :; do
    while [ ! -b /dev/vda ]; do sleep 0.1; done
    n=$((n + 1))
    {verify}
    (while dd if=/dev/vda of=/dev/null iflag=direct bs=64k; do :; done) 2>/dev/null &
    reader=$!
    size=$(cat /sys/block/vda/size)
    echo \"CAROM-WORKED $n\"
    while [ -e /sys/block/vda ]; do
        now=$(cat /sys/block/vda/size 2>/dev/null) && [ \"$now\" != \"$size\" ] && echo \"CAROM-SIZE $now\" && size=$now
        sleep 0.1
    done
    wait $reader
    echo \"CAROM-GONE $n\"
done
"
    )
}

#[guest_test]
fn disk_is_added_resized_and_removed_while_it_is_read() {
    let mut vmm = ApiVmm::start(&SITE, &use_whenever_there()).unwrap();
    let image = image(vmm.dir(), "disk.img");
    create_and_boot(&vmm, json!({"iommu_bounce": {"size": 16 * MIB}}));
    vmm.wait_for("CAROM-READY", 1, BOOT_TIME).unwrap();

    for (round, iommu, slot) in [(1, true, "0000:00:02.0"), (2, false, "0000:00:12.0")] {
        let disk = json!({"path": image, "id": "disk", "iommu": iommu});
        let (status, added) = vmm.call("PUT", "/api/v1/vm.add-disk", Some(&disk)).unwrap();
        assert_eq!((status, &added), (200, &json!({"id": "disk", "bdf": slot})));
        let again = json!({"path": image, "id": "other"});
        let (status, message) = vmm.call("PUT", "/api/v1/vm.add-disk", Some(&again)).unwrap();
        assert!(status == 409 && message.to_string().contains("is given twice"), "{status}: {message}");
        vmm.wait_for(&format!("CAROM-WORKED {round}\n"), 1, BOOT_TIME).unwrap();
        vmm.wait_for("CAROM-VERIFY 0 4194304", round, BOOT_TIME).unwrap();
        let counted = counters(&vmm, "disk");
        assert!(counted["write_bytes"].as_u64().unwrap() >= 4 * MIB, "{counted}");
        assert_eq!(counted["errors"], 0, "{counted}");

        // Resize the disk while the guest reads it. The first resize makes Carom enlarge the file. Before the second resize,
        // the test enlarges the file itself. The third resize restores the original size.
        for (size, of_file) in [(SIZE + MIB, None), (SIZE + 2 * MIB, Some(SIZE + 2 * MIB)), (SIZE, None)] {
            let file = File::options().write(true).open(&image).unwrap();
            of_file.into_iter().for_each(|size| file.set_len(size).unwrap());
            put(&vmm, "vm.resize-disk", &json!({"id": "disk", "desired_size": size}));
            assert_eq!(file.metadata().unwrap().len(), size);
            vmm.wait_for(&format!("CAROM-SIZE {}\n", size / 512), round, BOOT_TIME).unwrap();
        }
        let resize = json!({"id": "disk", "desired_size": 1000});
        let (status, message) = vmm.call("PUT", "/api/v1/vm.resize-disk", Some(&resize)).unwrap();
        assert!(
            status == 400 && message.to_string().contains("desired_size: the new size is 1000 bytes"),
            "{status}: {message}"
        );

        put(&vmm, "vm.remove-device", &json!({"id": "disk"}));
        vmm.wait_for(&format!("CAROM-GONE {round}\n"), 1, BOOT_TIME).unwrap();
        wait_gone(&vmm, "disk");
        assert!(info(&vmm)["config"]["disks"].as_array().is_none_or(Vec::is_empty), "{}", info(&vmm));
    }
    assert_eq!(counters(&vmm, "_iommu")["faults"], 0);
    end(&mut vmm);
}

#[guest_test(
    slow = "snapshot::guest_with_a_window_continues_in_other_processes covers the guest, and unit tests cover a saved disk"
)]
fn guest_saved_during_disk_io_continues_in_another_process() {
    let verify = workload::fio_verify_on("/dev/vda", 4, 32);
    let mut vmm = ApiVmm::start(&SITE, &format!("while :; do\n{verify}\ndone\n")).unwrap();
    let image = image(vmm.dir(), "disk.img");
    let config = json!({
        "disks": [{"path": image, "iommu": true, "num_queues": 2}],
        "cpus": {"boot_vcpus": 2, "max_vcpus": 2},
        "iommu_bounce": {"size": 16 * MIB},
    });
    create_and_boot(&vmm, config);
    vmm.wait_for("CAROM-VERIFY 0", 1, BOOT_TIME).unwrap();
    for round in 0..2 {
        thread::sleep(Duration::from_millis(700));
        go_on_in_another_process(&mut vmm, &format!("snapshot-{round}"));
        vmm.wait_for("CAROM-VERIFY 0 4194304", 2, BOOT_TIME).unwrap();
        let counted = counters(&vmm, "_disk0");
        assert_eq!(counted["errors"], 0, "{counted}");
    }
}

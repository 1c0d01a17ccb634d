// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Errors of the host's disk images: if the host cannot read or write a part of an image, only requests to this part fail.
//! Other requests and other disks continue.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;

use carom_integration::api::ApiVmm;
use carom_integration::harness::guest_test;
use carom_integration::workload;
use serde_json::{Value, json};

use crate::api::BOOT_TIME;
use crate::disk::{SIZE, counters, image};
use crate::hotplug::{create_and_boot, put};
use crate::support::block_device::FailingDevice;
use crate::support::qemu_img::{self, Check};
use crate::support::{MIB, SITE};

/// Size of each of the two disks that the guest fills, in MiB.
const WANTED: u64 = SIZE / MIB;

/// Size of the host file system that contains the image of such a disk, in MiB. Each image has its own file system.
const ROOM: u64 = 20;

/// tmpfs that is unmounted when this value is dropped.
struct Tmpfs(PathBuf);

impl Tmpfs {
    fn new(place: PathBuf, mib: u64) -> Self {
        fs::create_dir(&place).unwrap();
        mount(&["-t", "tmpfs", "-o", &format!("size={mib}M"), "tmpfs"], &place);
        Self(place)
    }

    fn resize(&self, mib: u64) {
        mount(&["-o", &format!("remount,size={mib}M")], &self.0);
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let status = Command::new("umount").arg("--lazy").arg(&self.0).status();
        if !status.is_ok_and(|status| status.success()) {
            eprintln!("cannot unmount {}", self.0.display());
        }
    }
}

fn mount(arguments: &[&str], place: &Path) {
    let status = Command::new("mount").args(arguments).arg(place).status().unwrap();
    assert!(status.success(), "cannot mount {}: {status}", place.display());
}

/// Returns a job for four disks. It fills each MiB of the first two disks with the MiB's number, and reports whether the write
/// succeeded. Then it reads parts of the fourth disk. After a press of the power button, it repeats the failed writes. In the
/// background, it writes and verifies the third disk.
fn job() -> String {
    let verify = workload::fio_verify_on("/dev/vdc", 4, 16);
    format!(
        r#"
dmesg -n 1
presses() {{ awk '/ACPI:Ged/ {{ n += $2 + $3 }} END {{ print n + 0 }}' /proc/interrupts; }}
fill() {{
    yes $2 | dd of=/dev/$1 bs=1M seek=$2 count=1 iflag=fullblock conv=notrunc,fsync 2>/dev/null &&
        echo "CAROM-WROTE-$1 $2" || {{ echo $2 >>/tmp/failed-$1; echo "CAROM-FAILED-$1 $2"; }}
}}
part() {{
    dd if=/dev/vdd of=/dev/null bs=1M skip=$1 count=1 iflag=direct 2>/dev/null && echo "CAROM-READ $1" || echo "CAROM-UNREAD $1"
}}
(while [ ! -e /tmp/done ]; do
{verify}
done) &
for mib in $(seq 0 {last}); do
    fill vda $mib
    fill vdb $mib
done
for mib in $(seq 0 7); do part $mib; done
echo CAROM-FULL
until [ "$(presses)" != 0 ]; do sleep 0.1; done
for disk in vda vdb; do
    for mib in $(cat /tmp/failed-$disk); do fill $disk $mib; done
done
touch /tmp/done
wait
echo CAROM-FILLED
sleep 1000
"#,
        last = WANTED - 1
    )
}

/// Returns the numbers in the console's lines `KIND NUMBER`.
fn numbers(console: &str, kind: &str) -> Vec<u64> {
    console.lines().filter_map(|line| line.trim().strip_prefix(kind)?.trim().parse().ok()).collect()
}

/// Asserts that each MiB in `mibs` is filled with its number.
fn check_content(content: &[u8], mibs: &[u64]) {
    for &mib in mibs {
        let start = usize::try_from(mib * MIB).unwrap();
        let part = &content[start..start + usize::try_from(MIB).unwrap()];
        let wanted = format!("{mib}\n").into_bytes();
        assert!(part.iter().zip(wanted.iter().cycle()).all(|(byte, wanted)| byte == wanted), "MiB {mib} is lost");
    }
}

#[guest_test(needs(QemuImg), slow = "unit tests cover that a host error affects only its request")]
fn full_file_systems_and_a_cut_image_fail_only_their_requests() {
    let dir = tempfile::tempdir().unwrap();
    let small = ["raw", "qcow2"].map(|name| Tmpfs::new(dir.path().join(name), ROOM));
    let (raw, qcow2) = (image(&small[0].0, "disk"), qemu_img::create(&small[1].0, "disk", SIZE, None));
    let short = image(dir.path(), "short");
    let vmm = ApiVmm::start(&SITE, &job()).unwrap();
    let disks = json!([
        {"path": raw},
        {"path": qcow2, "image_type": "Qcow2"},
        {"path": image(dir.path(), "good")},
        {"path": short},
    ]);
    create_and_boot(&vmm, json!({"disks": disks, "cpus": {"boot_vcpus": 2, "max_vcpus": 2}}));
    // Truncate an image while the VM uses it.
    File::options().write(true).open(&short).unwrap().set_len(4 * MIB).unwrap();
    vmm.wait_for("CAROM-FULL", 1, BOOT_TIME).unwrap();

    let console = vmm.console();
    let verified = console.matches("CAROM-VERIFY 0").count();
    assert!(verified > 0, "{console}");
    assert_eq!(numbers(&console, "CAROM-READ"), [0, 1, 2, 3], "{console}");
    assert_eq!(numbers(&console, "CAROM-UNREAD"), [4, 5, 6, 7], "{console}");
    for (disk, id) in [("vda", "_disk0"), ("vdb", "_disk1")] {
        let (wrote, failed) =
            (numbers(&console, &format!("CAROM-WROTE-{disk}")), numbers(&console, &format!("CAROM-FAILED-{disk}")));
        assert_eq!(wrote.len() + failed.len(), usize::try_from(WANTED).unwrap());
        // Fewer than [`ROOM`] MiB may fit into the file system: a qcow2 image also needs space for its tables, and the last MiB
        // may fit only in part.
        assert!((ROOM - 2..=ROOM).contains(&(wrote.len() as u64)), "{disk}: {wrote:?}");
        assert!(counters(&vmm, id)["host_errors"].as_u64().unwrap() >= failed.len() as u64, "{}", counters(&vmm, id));
    }
    assert_eq!(counters(&vmm, "_disk2")["errors"], 0);

    // Provide space for the image, and for its raw copy, which `qemu_img::content` writes to the same directory.
    small.iter().for_each(|small| small.resize(4 * WANTED));
    put(&vmm, "vm.power-button", &Value::Null);
    vmm.wait_for("CAROM-FILLED", 1, BOOT_TIME).unwrap();

    let console = vmm.console();
    for disk in ["vda", "vdb"] {
        let wrote: BTreeSet<u64> = numbers(&console, &format!("CAROM-WROTE-{disk}")).into_iter().collect();
        assert!(wrote.into_iter().eq(0..WANTED), "{console}");
    }
    assert!(console.matches("CAROM-VERIFY 0").count() > verified, "{console}");
    assert_eq!(console.matches("CAROM-VERIFY").count(), console.matches("CAROM-VERIFY 0").count(), "{console}");
    put(&vmm, "vm.shutdown", &Value::Null);
    let all: Vec<u64> = (0..WANTED).collect();
    check_content(&fs::read(&raw).unwrap(), &all);
    assert_eq!(qemu_img::check(&qcow2), Check::Sound);
    check_content(&qemu_img::content(&qcow2), &all);
}

/// Range of MiB of the failing disk in which all requests fail.
const BAD: Range<u64> = 8..10;

/// Returns a job that tries to read and to write each of the first 16 MiB of the failing disk, and prints each success. Then
/// the job writes and verifies another disk. After a press of the power button, it tries the 16 MiB again.
fn job_of_a_failing_disk() -> String {
    let verify = workload::fio_verify_on("/dev/vdb", 4, 16);
    format!(
        r#"
dmesg -n 1
presses() {{ awk '/ACPI:Ged/ {{ n += $2 + $3 }} END {{ print n + 0 }}' /proc/interrupts; }}
try() {{
    for mib in $(seq 0 15); do
        dd if=/dev/vda of=/dev/null bs=1M skip=$mib count=1 iflag=direct 2>/dev/null && echo "CAROM-READ-$1 $mib"
        dd if=/dev/zero of=/dev/vda bs=1M seek=$mib count=1 oflag=direct conv=notrunc 2>/dev/null && echo "CAROM-WROTE-$1 $mib"
    done
}}
try bad
{verify}
echo CAROM-TRIED
until [ "$(presses)" != 0 ]; do sleep 0.1; done
try mended
echo CAROM-MENDED
sleep 1000
"#
    )
}

#[guest_test(needs(Dmsetup), slow = "unit tests cover that a host error affects only its request")]
fn failing_blocks_fail_only_requests_to_them_until_mended() {
    let dir = tempfile::tempdir().unwrap();
    let bad = BAD.start * MIB..BAD.end * MIB;
    let failing = FailingDevice::new("carom-failing", &image(dir.path(), "failing"), SIZE, bad);
    let vmm = ApiVmm::start(&SITE, &job_of_a_failing_disk()).unwrap();
    let disks = json!([{"path": failing.path(), "direct": true}, {"path": image(dir.path(), "good")}]);
    create_and_boot(&vmm, json!({"disks": disks}));
    vmm.wait_for("CAROM-TRIED", 1, BOOT_TIME).unwrap();

    let console = vmm.console();
    let sound: Vec<u64> = (0..16).filter(|mib| !BAD.contains(mib)).collect();
    assert_eq!(numbers(&console, "CAROM-READ-bad"), sound, "{console}");
    assert_eq!(numbers(&console, "CAROM-WROTE-bad"), sound, "{console}");
    assert!(console.contains("CAROM-VERIFY 0"), "{console}");
    assert!(counters(&vmm, "_disk0")["host_errors"].as_u64().unwrap() >= 4, "{}", counters(&vmm, "_disk0"));
    assert_eq!(counters(&vmm, "_disk1")["errors"], 0);

    failing.mend();
    put(&vmm, "vm.power-button", &Value::Null);
    vmm.wait_for("CAROM-MENDED", 1, BOOT_TIME).unwrap();
    let console = vmm.console();
    let all: Vec<u64> = (0..16).collect();
    assert_eq!(
        (numbers(&console, "CAROM-READ-mended"), numbers(&console, "CAROM-WROTE-mended")),
        (all.clone(), all),
        "{console}"
    );
    put(&vmm, "vmm.shutdown", &Value::Null);
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Devices that other host processes serve (vhost-user): a file system by Debian's virtiofsd, and a disk by QEMU's storage
//! daemon or by the tests' own server.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use carom_integration::api::ApiVmm;
use carom_integration::harness::{STORAGE_DAEMON, VIRTIOFSD, guest_test};
use carom_integration::workload;
use carom_tools::children::KilledOnDrop;
use serde_json::{Value, json};

use crate::api::BOOT_TIME;
use crate::hotplug::{create_and_boot, put, wait_gone};
use crate::support::server::serve;
use crate::support::{MIB, SITE};

/// Starts Debian's virtiofsd, which exports the directory `source`.
fn virtiofsd(source: &Path, socket: &Path) -> KilledOnDrop {
    let mut command = Command::new(VIRTIOFSD);
    command.arg("-f").arg(format!("--socket-path={}", socket.display()));
    command.arg("-o").arg(format!("source={},sandbox=chroot", source.display())).stdin(Stdio::null());
    serve(&mut command, socket)
}

/// Starts QEMU's storage daemon, which exports `image` as a disk with two queues.
pub(crate) fn storage_daemon(image: &Path, socket: &Path) -> KilledOnDrop {
    let mut command = Command::new(STORAGE_DAEMON);
    command.arg("--blockdev").arg(format!("driver=file,node-name=image,filename={}", image.display()));
    let export = "type=vhost-user-blk,id=disk,node-name=image,writable=on,num-queues=2,addr.type=unix";
    command.arg("--export").arg(format!("{export},addr.path={}", socket.display())).stdin(Stdio::null());
    serve(&mut command, socket)
}

/// Returns the text of `count` consecutive numbers from `first` on, one per line.
fn numbers(first: u32, count: u32) -> Vec<u8> {
    (first..first + count).flat_map(|number| format!("{number}\n").into_bytes()).collect()
}

/// Number of lines of a file with numbers. The file is larger than 1 MiB.
const COUNT: u32 = 200_000;

/// Returns a job that uses the file system each time it is added. The job compares the host's file with the expected numbers,
/// and writes a file with as many numbers. Then it unmounts the file system, and waits until the device is removed.
fn use_whenever_there() -> String {
    format!(
        r#"
echo CAROM-READY
n=0
while :; do
    n=$((n + 1))
    until mount -t virtiofs share /mnt 2>/dev/null; do sleep 0.2; done
    echo "CAROM-MOUNTED $n"
    until [ -e /mnt/go ]; do sleep 0.1; done
    seq 1 {COUNT} | cmp - /mnt/from-host && echo "CAROM-SAME $n"
    seq {COUNT} $((2 * {COUNT} - 1)) >/mnt/from-guest-$n && sync && echo "CAROM-WROTE $n"
    mkdir /mnt/dir && mv /mnt/go /mnt/dir/gone && ls -l /mnt /mnt/dir >/dev/null
    umount /mnt && echo "CAROM-LEFT $n"
    until [ ! -e /sys/bus/virtio/drivers/virtiofs/virtio* ]; do sleep 0.1; done
    echo "CAROM-GONE $n"
done
"#
    )
}

fn call(vmm: &ApiVmm, operation: &str, body: &Value) -> (u16, String) {
    let (status, answer) = vmm.call("PUT", &format!("/api/v1/{operation}"), Some(body)).unwrap();
    (status, answer.to_string())
}

/// Checks the exported directory after this round: it contains the file that the guest wrote, and the guest moved `go` to the
/// directory `dir`. Then removes `dir`.
fn check_share(share: &Path, round: u32) {
    assert!(fs::read(share.join(format!("from-guest-{round}"))).unwrap() == numbers(COUNT, COUNT), "bytes differ");
    assert!(share.join("dir/gone").exists() && !share.join("go").exists());
    fs::remove_dir_all(share.join("dir")).unwrap();
}

/// Boots a VM with the file system, to which RAM can be added.
fn boot(socket: &Path) -> ApiVmm {
    let vmm = ApiVmm::start(&SITE, &format!("mkdir -p /mnt\n{}", use_whenever_there())).unwrap();
    let device = json!({"tag": "share", "socket": socket, "id": "files"});
    let memory = json!({"size": 512 * MIB, "shared": true, "hotplug_size": 256 * MIB});
    create_and_boot(&vmm, json!({"fs": [device], "memory": memory}));
    vmm
}

/// Creates the exported directory, with the file `from-host`.
fn share(dir: &Path) -> PathBuf {
    let share = dir.join("share");
    fs::create_dir(&share).unwrap();
    fs::write(share.join("from-host"), numbers(1, COUNT)).unwrap();
    share
}

#[guest_test(needs(Virtiofsd))]
fn files_of_the_host_are_read_and_written_by_virtiofsd() {
    let dir = tempfile::tempdir().unwrap();
    let (share, socket) = (share(dir.path()), dir.path().join("fs.sock"));
    fs::write(share.join("go"), "").unwrap();
    let _server = virtiofsd(&share, &socket);
    let vmm = boot(&socket);
    vmm.wait_for("CAROM-LEFT 1", 1, BOOT_TIME).unwrap();
    assert!(vmm.console().contains("CAROM-SAME 1") && vmm.console().contains("CAROM-WROTE 1"), "{}", vmm.console());
    check_share(&share, 1);
}

#[guest_test(needs(Virtiofsd), slow = "another test covers reads and writes, and unit tests cover a lost server")]
fn virtiofsd_share_survives_added_ram_a_pause_and_a_replug() {
    let dir = tempfile::tempdir().unwrap();
    let (share, socket) = (share(dir.path()), dir.path().join("fs.sock"));
    let server = virtiofsd(&share, &socket);
    let vmm = boot(&socket);
    vmm.wait_for("CAROM-MOUNTED 1", 1, BOOT_TIME).unwrap();

    // The server must map the added RAM, and stop its queues while the VM is paused.
    assert_eq!(call(&vmm, "vm.resize", &json!({"desired_ram": 640 * MIB})).0, 204);
    put(&vmm, "vm.pause", &Value::Null);
    let saved = dir.path().join("saved").display().to_string();
    let (status, answer) = call(&vmm, "vm.snapshot", &json!({"destination_url": format!("file://{saved}")}));
    assert!(status != 204 && answer.contains("files") && answer.contains("vhost-user"), "{status} {answer}");
    put(&vmm, "vm.resume", &Value::Null);
    fs::write(share.join("go"), "").unwrap();
    vmm.wait_for("CAROM-LEFT 1", 1, BOOT_TIME).unwrap();
    assert!(vmm.console().contains("CAROM-SAME 1") && vmm.console().contains("CAROM-WROTE 1"), "{}", vmm.console());
    check_share(&share, 1);

    let second = json!({"tag": "share", "socket": socket, "id": "files"});
    assert_eq!(call(&vmm, "vm.add-fs", &second).0, 409, "a second device got this name");
    put(&vmm, "vm.remove-device", &json!({"id": "files"}));
    vmm.wait_for("CAROM-GONE 1", 1, BOOT_TIME).unwrap();
    wait_gone(&vmm, "files");
    drop(server);
    let (status, answer) = call(&vmm, "vm.add-fs", &second);
    assert!(status == 400 && answer.contains("cannot connect to the vhost-user server"), "{status} {answer}");
    let _server = virtiofsd(&share, &socket);
    fs::write(share.join("go"), "").unwrap();
    let (status, answer) = call(&vmm, "vm.add-fs", &second);
    assert_eq!(status, 200, "{answer}");
    vmm.wait_for("CAROM-LEFT 2", 1, BOOT_TIME).unwrap();
    assert!(vmm.console().contains("CAROM-SAME 2"), "{}", vmm.console());
    check_share(&share, 2);
}

/// Offset of the guest's numbers on its disk, in MiB.
const NUMBERS_AT: u64 = 32;

#[guest_test(needs(StorageDaemon), slow = "unit tests cover a server that is lost and started again")]
fn disk_of_a_storage_daemon_survives_a_new_daemon() {
    let dir = tempfile::tempdir().unwrap();
    let (image, socket) = (dir.path().join("disk.img"), dir.path().join("disk.sock"));
    File::create_new(&image).unwrap().set_len(64 * MIB).unwrap();
    let server = storage_daemon(&image, &socket);
    let job = format!(
        "presses() {{ awk '/ACPI:Ged/ {{ n += $2 + $3 }} END {{ print n + 0 }}' /proc/interrupts; }}
echo \"CAROM-SECTORS $(cat /sys/block/vda/size)\"
echo \"CAROM-QUEUES $(ls /sys/block/vda/mq | wc -l)\"
seq 1 {COUNT} | dd of=/dev/vda bs=1M seek={NUMBERS_AT} conv=fsync 2>/dev/null && echo CAROM-WRITTEN
until [ \"$(presses)\" != 0 ]; do sleep 0.1; done
dd if=/dev/vda bs=1M skip={NUMBERS_AT} count=8 iflag=direct 2>/dev/null | head -n {COUNT} >/tmp/read
seq 1 {COUNT} | cmp - /tmp/read && echo CAROM-SAME-AGAIN
sleep 1000
"
    );
    let vmm = ApiVmm::start(&SITE, &job).unwrap();
    let disk = json!({"vhost_user": true, "vhost_socket": socket, "num_queues": 2, "id": "disk"});
    let memory = json!({"size": 512 * MIB, "shared": true});
    create_and_boot(&vmm, json!({"disks": [disk], "memory": memory, "cpus": {"boot_vcpus": 2, "max_vcpus": 2}}));
    vmm.wait_for("CAROM-WRITTEN", 1, BOOT_TIME).unwrap();
    let console = vmm.console();
    assert!(console.contains("CAROM-SECTORS 131072") && console.contains("CAROM-QUEUES 2"), "{console}");

    drop(server);
    let _server = storage_daemon(&image, &socket);
    put(&vmm, "vm.power-button", &Value::Null);
    vmm.wait_for("CAROM-SAME-AGAIN", 1, BOOT_TIME).unwrap();
    let counters = vmm.call("GET", "/api/v1/vm.counters", None).unwrap().1;
    assert_eq!((&counters["disk"]["server_connections"], &counters["disk"]["server_losses"]), (&json!(2), &json!(1)));
    check_numbers(&image);
}

/// Asserts that the image contains the numbers that the guest writes.
fn check_numbers(image: &Path) {
    let wanted = numbers(1, COUNT);
    let mut bytes = vec![0; wanted.len()];
    File::open(image).unwrap().read_exact_at(&mut bytes, NUMBERS_AT * MIB).unwrap();
    assert!(bytes == wanted, "what the guest wrote is not in the image");
}

/// Checks a disk of the tests' own server behind the virtio-iommu, with requests of one sector to 1 MiB. `bounce` is the VM's
/// `iommu_bounce`. If it is null, the guest has no windows. Returns the virtio-iommu's counters.
fn works_behind_the_iommu(bounce: &Value) -> Value {
    let dir = tempfile::tempdir().unwrap();
    let (image, socket) = (dir.path().join("disk.img"), dir.path().join("disk.sock"));
    File::create_new(&image).unwrap().set_len(64 * MIB).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_device-server"));
    command.arg("--socket").arg(&socket).arg("--disk").arg(&image).arg("--iommu").stdin(Stdio::null());
    let _server = serve(&mut command, &socket);
    let verify = workload::fio_verify_on("/dev/vda", 8, 32);
    let job = format!(
        "{verify}seq 1 {COUNT} | dd of=/dev/vda bs=1M seek={NUMBERS_AT} iflag=fullblock oflag=direct conv=sync 2>/dev/null
dd if=/dev/vda bs=1M skip={NUMBERS_AT} count=8 iflag=direct 2>/dev/null | head -n {COUNT} >/tmp/read
seq 1 {COUNT} | cmp - /tmp/read && echo CAROM-SAME
sleep 1000
"
    );
    let vmm = ApiVmm::start(&SITE, &job).unwrap();
    let disk = json!({"vhost_user": true, "vhost_socket": socket, "num_queues": 2, "id": "disk", "iommu": true});
    let mut vm = json!({"disks": [disk], "memory": {"size": 512 * MIB, "shared": true}});
    if !bounce.is_null() {
        vm["iommu_bounce"] = bounce.clone();
    }
    create_and_boot(&vmm, vm);
    vmm.wait_for("CAROM-SAME", 1, BOOT_TIME).unwrap();
    assert!(vmm.console().contains(&format!("CAROM-VERIFY 0 {}\n", 8 * MIB)), "{}", vmm.console());
    let counters = vmm.call("GET", "/api/v1/vm.counters", None).unwrap().1;
    assert_eq!((&counters["_iommu"]["faults"], &counters["disk"]["server_losses"]), (&json!(0), &json!(0)));
    check_numbers(&image);
    counters["_iommu"].clone()
}

#[guest_test(
    slow = "the test of a server's card behind the IOMMU covers the messages, and unit tests cover rejected accesses"
)]
fn disk_of_a_server_behind_the_iommu_uses_mappings_or_a_window() {
    let strict = works_behind_the_iommu(&Value::Null);
    assert!(strict["requests_unmap"].as_u64().unwrap() > 300, "not every buffer was unmapped: {strict}");
    let bounce = works_behind_the_iommu(&json!({"size": 64 * MIB}));
    assert!(bounce["window_bytes"].as_u64().unwrap() > 0, "{bounce}");
    // With a window, the guest maps only requests that are larger than a slot, and requests at the start, when the window is
    // still too small.
    assert!(
        bounce["requests_map"].as_u64() < strict["requests_map"].as_u64().map(|maps| maps / 10),
        "{bounce} {strict}"
    );
}

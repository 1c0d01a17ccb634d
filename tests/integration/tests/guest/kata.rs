// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Life of a Kata Containers sandbox with a real guest. Kata's own API client sends Carom the same requests as Kata's runtime
//! (`docs/kata.md`).

use std::env;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::symlink;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use carom_integration::Site;
use carom_integration::api::ApiVmm;
use carom_integration::harness::guest_test;

use crate::api::BOOT_TIME;
use crate::hotplug::wait_gone;
use crate::support::{MIB, SITE};

/// Job that writes its observations to the added disk, because the guest has no console. The job onlines added CPUs and RAM,
/// like Kata's agent.
const TELL: &str = r#"
exec >/dev/null 2>&1
while [ ! -b /dev/vda ]; do sleep 0.1; done
while [ -b /dev/vda ]; do
    for cpu in /sys/devices/system/cpu/cpu*/online; do echo 1 >$cpu; done
    for block in /sys/devices/system/memory/memory*/state; do echo online >$block; done
    {
        echo "segments=$(ls -d /sys/devices/pci*:00 | wc -l)"
        echo "net=$(cat /sys/class/net/*/address | grep -c 02:00:ca:fe:00:01)"
        echo "nvme=$(ls -d /dev/nvme0n1 | wc -l)"
        echo "cpus=$(nproc)"
        echo "mib=$(awk '/^MemTotal/ { print int($2 / 1024) }' /proc/meminfo)"
        echo end
        cat /dev/zero
    } | dd of=/dev/vda bs=512 count=1 iflag=fullblock conv=fsync,notrunc
    sleep 0.2
done
sleep 1000
"#;

/// Returns the text that the guest last wrote to the disk.
fn report(vmm: &ApiVmm) -> String {
    let mut start = [0; 512];
    File::open(vmm.dir().join("disk.img")).unwrap().read_exact(&mut start).unwrap();
    String::from_utf8_lossy(&start).trim_end_matches('\0').to_owned()
}

/// Waits until `wanted` is true for the text on the disk.
fn wait_for_report(vmm: &ApiVmm, wanted: impl Fn(&str) -> bool) {
    let start = Instant::now();
    while !wanted(&report(vmm)) {
        assert!(start.elapsed() < BOOT_TIME, "timeout; last report of the guest: {}", report(vmm));
        thread::sleep(Duration::from_millis(100));
    }
}

fn mib(report: &str) -> u64 {
    report.lines().find_map(|line| line.strip_prefix("mib=")?.parse().ok()).unwrap_or(0)
}

#[guest_test]
fn kata_client_drives_a_guest_through_a_sandboxs_life() {
    let Some(client) = env::var_os("CAROM_KATA_CLIENT") else {
        println!("not tested: CAROM_KATA_CLIENT does not name Kata Containers' client");
        return;
    };
    let mut vmm = ApiVmm::start(&SITE, TELL).unwrap();
    symlink(vmm.kernel(), vmm.dir().join("kernel")).unwrap();
    symlink(vmm.initramfs(), vmm.dir().join("initrd")).unwrap();
    File::create_new(vmm.dir().join("disk.img")).unwrap().set_len(16 * MIB).unwrap();
    let call = |step: &str| {
        let output = Command::new(&client).arg(vmm.socket()).arg(vmm.dir()).arg(step).output().unwrap();
        let said = [output.stdout, output.stderr].map(|said| String::from_utf8_lossy(&said).into_owned()).concat();
        assert!(output.status.success(), "{step}: {said}");
        said
    };
    for step in ["ping", "create", "info", "add-net", "boot"] {
        call(step);
    }
    assert!(call("info").contains("\"state\":\"Running\""));
    let disk = call("add-disk");
    assert!(disk.contains("\"bdf\":\"0000:00:05.0\""), "{disk}");
    wait_for_report(&vmm, |report| {
        ["segments=2\n", "net=1\n", "nvme=0\n", "cpus=1\n"].iter().all(|part| report.contains(part))
    });
    let before = mib(&report(&vmm));
    let drive = call(&format!("add-device={}", Site::sysfs(&SITE.nvme[0]).display()));
    assert!(drive.contains("\"bdf\":\"0000:00:06.0\""), "{drive}");
    wait_for_report(&vmm, |report| report.contains("nvme=1\n"));
    call("resize-memory");
    wait_for_report(&vmm, |report| mib(report) >= before + 200);
    call("resize-vcpus");
    wait_for_report(&vmm, |report| report.contains("cpus=2\n"));
    println!("CAROM-KATA {}", report(&vmm).replace('\n', " "));
    call("remove-device=_vfio0");
    wait_for_report(&vmm, |report| report.contains("nvme=0\n"));
    wait_gone(&vmm, "_vfio0");
    for step in ["pause", "resume", "remove-device=_disk0"] {
        call(step);
    }
    wait_gone(&vmm, "_disk0");
    call("ping");
    call("shutdown-vmm");
    assert!(vmm.wait(BOOT_TIME).unwrap().success());
    assert!(fs::symlink_metadata(vmm.dir().join("clh.sock")).is_err(), "the socket still exists");
}

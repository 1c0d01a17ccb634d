// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Patched kernel that a Debian guest installs as a package (`scripts/guest-kernel --deb`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use carom_integration::Site;
use carom_integration::harness::{guest_test, tell};
use tempfile::TempDir;

use crate::distribution::{installs, works};
use crate::support::SITE;
use crate::support::debian::{Debian, Network};
use crate::support::repository::Repository;

/// Source of a module that is not part of the kernel.
const MODULE: &str = "#include <linux/module.h>
static int __init greeting(void) { pr_info(\"carom_greeting: loaded\\n\"); return 0; }
static void __exit farewell(void) { }
module_init(greeting);
module_exit(farewell);
MODULE_LICENSE(\"GPL\");
MODULE_DESCRIPTION(\"Test\");
";

/// Packages of a kernel.
struct Packages {
    image: PathBuf,
    headers: PathBuf,
    /// Release of the kernel, as `uname -r` prints it.
    release: String,
}

impl Packages {
    fn read(dir: &Path) -> Self {
        let files: Vec<PathBuf> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        let starting = |start: &str| {
            let mut found = files.iter().filter(|file| file.file_name().unwrap().to_str().unwrap().starts_with(start));
            found.next().unwrap_or_else(|| panic!("{start}* is missing in {}", dir.display())).clone()
        };
        let (image, headers) = (starting("linux-image-"), starting("linux-headers-"));
        let name = image.file_name().unwrap().to_str().unwrap();
        let release = name.trim_start_matches("linux-image-").split('_').next().unwrap().to_owned();
        Self { image, headers, release }
    }

    /// Builds a module in `dir` from the unpacked headers. Returns the module's file.
    fn module(&self, dir: &TempDir) -> PathBuf {
        let run = |command: &mut Command| {
            let output = command.output().unwrap();
            let said = [output.stdout, output.stderr].concat();
            assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&said));
        };
        let (headers, source) = (dir.path().join("headers"), dir.path().join("source"));
        run(Command::new("dpkg").arg("-x").arg(&self.headers).arg(&headers));
        fs::create_dir(&source).unwrap();
        fs::write(source.join("Kbuild"), "obj-m := carom_greeting.o\n").unwrap();
        fs::write(source.join("carom_greeting.c"), MODULE).unwrap();
        let tree = headers.join(format!("usr/src/linux-headers-{}", self.release));
        run(Command::new("make").arg("-C").arg(tree).arg(format!("M={}", source.display())).arg("modules"));
        tell("a module was built from the headers");
        source.join("carom_greeting.ko")
    }
}

/// Returns the number of bounced mappings of a device of the guest, by the patch's files in debugfs.
fn bounced(debian: &mut Debian, device: &str) -> u64 {
    let sum = format!(
        "awk '$1 == \"device\" {{ mine = $2 == \"{device}\" }} mine && /^bounced_/ {{ n += $2 }} END {{ print n + 0 }}'"
    );
    debian.run(&format!("cat /sys/kernel/debug/iommu_bounce/domain*/stats | {sum}")).trim().parse().unwrap()
}

#[guest_test(
    needs(Distribution, KernelPackages),
    slow = "several minutes; small guests cover bouncing of disks, network cards and drives"
)]
fn kernel_installed_in_debian_boots_and_bounces() {
    let (tap, net) = ("carom-d5", "10.77.65");
    let _network = Network::start(tap, net);
    let packages = Packages::read(SITE.kernel_packages.as_ref().unwrap());
    let release = &packages.release;
    let repository = Repository::serve(&[&packages.image, &packages.headers]);
    let mut debian = Debian::start(tap, "", &[]);
    debian.log_in();
    works(&mut debian, net);
    installs(&mut debian, &repository, &[&format!("linux-image-{release}"), &format!("linux-headers-{release}")]);
    debian.run(&format!("test -s /boot/initrd.img-{release} && test -e /lib/modules/{release}/build/Makefile"));
    // Debian's own kernel is still installed.
    assert_eq!(debian.run("ls /boot/vmlinuz-* | wc -l"), "2\n");
    debian.power_off();
    let dir = tempfile::tempdir().unwrap();
    repository.publish(&packages.module(&dir));

    let drive = format!("path={},iommu=on", Site::sysfs(&SITE.nvme[0]).display());
    let options = ["--rng", "src=/dev/urandom,iommu=on", "--device", &drive, "--iommu-bounce", "size=64M"];
    debian.boot_installed(release, tap, &options);
    debian.log_in();
    assert_eq!(debian.run("uname -r"), format!("{release}\n"));
    works(&mut debian, net);

    // Data that was written to the passed-through drive is correct after remounting.
    let device = debian.run("basename $(readlink -f /sys/class/nvme/nvme0/device)").trim().to_owned();
    let before = bounced(&mut debian, &device);
    debian.run("mkfs.ext4 -q -F /dev/nvme0n1 && mount /dev/nvme0n1 /mnt && head -c 16M /dev/urandom >/root/bytes");
    debian.run("cp /root/bytes /mnt && for i in $(seq 50); do echo $i >/mnt/$i; sync /mnt/$i; done; umount /mnt");
    debian.run("mount /dev/nvme0n1 /mnt && cmp /root/bytes /mnt/bytes && for i in $(seq 50); do grep -qx $i /mnt/$i || exit 1; done");
    debian.run("umount /mnt && fsck.ext4 -fn /dev/nvme0n1");
    let after = bounced(&mut debian, &device);
    let disk = debian.run("basename $(readlink -f /sys/block/vda/device/..)").trim().to_owned();
    let of_disk = bounced(&mut debian, &disk);
    tell(&format!("{} mappings of the drive and {of_disk} of the disk bounced", after - before));
    assert!(after - before > 50 && of_disk > 0, "drive: {before} to {after}, disk: {of_disk}");
    let counters = debian.iommu_counters();
    assert!(counters["window_bytes"].as_u64().unwrap() > 0, "{counters}");
    assert_eq!(counters["faults"], 0, "{counters}");

    let module = format!("http://host.internal:{}/carom_greeting.ko", repository.port);
    debian.run(&format!("/usr/lib/apt/apt-helper download-file {module} /root/carom_greeting.ko"));
    debian.run("insmod /root/carom_greeting.ko && dmesg | grep -q 'carom_greeting: loaded' && rmmod carom_greeting");
    debian.power_off();
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! VMM of an unprivileged user, with descriptors of files that another user has opened (`--inherit`).

use std::fmt::Write;
use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use carom_integration::harness::guest_test;
use carom_integration::workload::{self, WAIT_FOR_NVME};
use carom_integration::{Guest, Limits, Site, run_limited};

use crate::support::{MIB, SITE};

/// ID of a user who owns no file. Their only group has the same ID.
const NOBODY: u32 = 64000;
const WITHOUT_RIGHTS: &str = "setpriv --reuid=64000 --regid=64000 --clear-groups --bounding-set=-all --inh-caps=-all prlimit --memlock=268435456:268435456";

/// Returns VFIO's character device of a PCI function.
fn character_device(function: &Path) -> PathBuf {
    let entry = fs::read_dir(function.join("vfio-dev")).unwrap().next().unwrap().unwrap();
    Path::new("/dev/vfio/devices").join(entry.file_name())
}

#[guest_test(slow = "a test with a guest without drivers covers KVM and a disk by descriptors", by_iommufd)]
fn guest_of_descriptors_works_for_a_user_without_rights() {
    let scratch = tempfile::tempdir().unwrap();
    let dir = scratch.path();
    let disk = dir.join("disk");
    File::create(&disk).unwrap().set_len(16 * MIB).unwrap();
    fs::set_permissions(&disk, fs::Permissions::from_mode(0o600)).unwrap();
    let mut opened = vec![(5, PathBuf::from("/dev/kvm")), (6, disk)];
    let mut work = workload::fio_verify_on("/dev/vda", 4, 8);
    let mut guest = Guest::new("inherited").disk("path=/dev/fd/6,image_type=raw");
    // Carom opens VFIO groups and containers only by path, and this user cannot open them. So the guest has a host device only
    // if the test runs with IOMMUFD.
    if SITE.iommufd {
        let function = Site::sysfs(&SITE.nvme[0]);
        opened.extend([(7, PathBuf::from("/dev/iommu")), (8, character_device(&function))]);
        work = format!("{WAIT_FOR_NVME}{work}{}", workload::fio_verify(8, 32));
        guest = guest.iommu_device(&SITE.nvme[0]).bounce("size=32M").cmdline("iommu.strict=1");
    }
    let script = guest.job(&work).write_command(&SITE, dir).unwrap();

    // The user may lack access to the original kernel and carom, so copy both to the user's directory.
    fs::copy(&SITE.kernel, dir.join("kernel")).unwrap();
    fs::copy(&SITE.carom, dir.join("carom")).unwrap();
    let command = fs::read_to_string(&script).unwrap();
    let command = command.replace(&SITE.kernel.display().to_string(), &dir.join("kernel").display().to_string());
    let command = command.replace(&SITE.carom.display().to_string(), &dir.join("carom").display().to_string());
    let (mut redirections, mut options) = (String::new(), String::new());
    for (number, path) in &opened {
        write!(redirections, " {number}<>{}", path.display()).unwrap();
        write!(options, " --inherit fd={number}").unwrap();
    }
    fs::write(&script, format!("{}{options} --landlock\n", command.trim_end())).unwrap();
    for file in ["initramfs", "kernel", "carom", "vmm"] {
        fs::set_permissions(dir.join(file), fs::Permissions::from_mode(0o755)).unwrap();
    }
    chown(dir, Some(NOBODY), Some(NOBODY)).unwrap();

    let run = |redirections: &str| {
        let logs = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command
            .arg("-c")
            .arg(format!("exec{redirections}; exec {WITHOUT_RIGHTS} '{}'", script.display()))
            .current_dir("/");
        let limits = Limits { time: Duration::from_secs(90), stop_on_panic: true };
        run_limited(&mut command, &logs.path().join("console"), limits, None).unwrap()
    };
    let refused = run(&format!("{redirections} 5<>/dev/null"));
    assert!(refused.stderr.contains("--inherit fd=5: is neither /dev/kvm"), "{}", refused.stderr);

    let finished = run(&redirections);
    let verified = finished.stdout.matches("CAROM-VERIFY 0 ").count();
    assert_eq!(verified, if SITE.iommufd { 2 } else { 1 }, "{}\n{}", finished.stderr, finished.stdout);
}

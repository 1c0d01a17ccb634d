// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! VMM that runs as an unprivileged user. The user owns the files that the VMM needs (`docs/unprivileged.md`).

use std::fs;
use std::os::unix::fs::{MetadataExt, chown};
use std::path::{Path, PathBuf};

use carom_integration::Site;
use carom_integration::harness::guest_test;
use carom_integration::workload::{self, WAIT_FOR_NVME};

use crate::support::{MIB, SITE, guest_with_windows, number, run};

/// User ID that is not in use.
const USER: u32 = 64_000;

/// File that the user owns until this value is dropped.
pub(crate) struct Lent(PathBuf, u32);

impl Lent {
    pub(crate) fn new(path: PathBuf, user: u32) -> Self {
        let owner = fs::metadata(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display())).uid();
        chown(&path, Some(user), None).unwrap();
        Self(path, owner)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        // This fails only if the file has been removed.
        let _ = chown(&self.0, Some(self.1), None);
    }
}

/// Returns VFIO's file for the drive: the device's own file with IOMMUFD, otherwise the file of the device's group.
pub(crate) fn file_of(address: &str) -> PathBuf {
    let directory = Site::sysfs(address);
    if SITE.iommufd {
        let entry = fs::read_dir(directory.join("vfio-dev")).unwrap().next().unwrap().unwrap();
        return Path::new("/dev/vfio/devices").join(entry.file_name());
    }
    let group = fs::read_link(directory.join("iommu_group")).unwrap();
    Path::new("/dev/vfio").join(group.file_name().unwrap())
}

/// The limit on locked memory is 128 MiB: 64 MiB for windows, and 64 MiB that the guest may map. Without a virtual IOMMU, the
/// host would pin all 512 MiB of the guest's RAM.
#[guest_test(slow = "tests as root cover limits on locked memory, vmm/tests/landlock.rs covers the rest of Landlock")]
fn ordinary_user_bounces_a_drive_within_limit_and_landlock() {
    let image = tempfile::NamedTempFile::new().unwrap();
    fs::write(image.path(), [b'x'; 4096]).unwrap();
    let guest = |name: &str| {
        guest_with_windows(name)
            .disk(&format!("path={},image_type=raw", image.path().display()))
            .user(USER)
            .locked_memory(128 * MIB)
            .landlock()
            .job(&format!(
                "{WAIT_FOR_NVME}{}\necho \"CAROM-DISK $(head -c 4096 /dev/vda | tr -dc x | wc -c)\"\n",
                workload::fio_verify(32, 64)
            ))
    };
    let _kvm = Lent::new("/dev/kvm".into(), USER);
    let _iommufd = SITE.iommufd.then(|| Lent::new("/dev/iommu".into(), USER));
    let _image = Lent::new(image.path().into(), USER);
    let refused = format!("{:#}", guest("unprivileged-refused").run(&SITE).unwrap_err());
    let file = file_of(&SITE.nvme[0]);
    assert!(refused.contains(&format!("{}: Permission denied", file.display())), "{refused}");

    let _file = Lent::new(file, USER);
    let outcome = run(&guest("unprivileged"));

    workload::check_verified(&outcome, 1).unwrap_or_else(|error| panic!("{error:#}"));
    assert_eq!(number(&outcome, "CAROM-DISK"), 4096);
    let pinned = outcome.peak_pinned_bytes;
    assert!((1..=128 * MIB).contains(&pinned), "{pinned} bytes pinned");
}

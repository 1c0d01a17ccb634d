// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Firmware for guests, and a disk that the firmware boots: the Debian of [`crate::distribution`] with a boot loader.

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write, copy};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::distribution::{Distribution, LABEL};
use crate::key::Key;
use crate::tools::Tools;

/// Alignment of partitions, in bytes.
const MIB: u64 = 1 << 20;
/// Length of the EFI system partition. The partition begins after the first MiB of the disk.
const ESP_LEN: u64 = 64 * MIB;
/// Start of the root file system's partition.
const ROOT_START: u64 = MIB + ESP_LEN;
/// Space for the backup GPT at the end of the disk.
const TABLE_LEN: u64 = MIB;

/// Files of a machine that boots by firmware. The image is read-only: give each guest a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Firmware {
    /// EDK2's firmware.
    pub firmware: PathBuf,
    /// Raw disk image with a GPT: an EFI system partition with Debian's boot loader, and the root file system.
    pub disk: PathBuf,
}

impl Firmware {
    /// Returns the paths of the firmware and the disk in `dir`, which is a directory of the cache.
    #[must_use]
    pub fn in_directory(dir: &Path) -> Self {
        Self { firmware: dir.join("CLOUDHV.fd"), disk: dir.join("disk.raw") }
    }
}

/// Returns the boot loader's script. The script loads the kernel through a link that Debian's packages make.
fn boot_script() -> String {
    format!(
        "search --no-floppy --label {LABEL} --set root
linux /vmlinuz root=LABEL={LABEL} rw console=ttyS0 quiet iommu.strict=1 panic=-1
initrd /initrd.img
boot
"
    )
}

impl Tools<'_> {
    /// Returns the directory that contains the files of [`Firmware`]. If the directory is missing, creates it. No Debian release before
    /// forky has the firmware, so the firmware is a package of the unstable suite.
    ///
    /// # Errors
    /// Fails if the directory cannot be made, or on a signal.
    pub fn firmware(&self) -> Result<PathBuf> {
        let (distribution, edk2, grub) = (
            self.distribution()?,
            self.fetch_unstable("cloudhv-efi-x86-64")?,
            self.fetch_deb("grub-efi-amd64-signed")?,
        );
        // When a change to this code changes the disk, increase this number.
        let mut key = Key::default().text("disk 1").text(&boot_script());
        for dir in [&distribution, &edk2, &grub] {
            key = key.text(&dir.display().to_string());
        }
        let dir = self.cached("firmware", &key.finish(), |dir| {
            let files = Firmware::in_directory(dir);
            let source = edk2.join("usr/share/cloudhv-efi-x86-64/CLOUDHV.fd");
            fs::copy(&source, &files.firmware).with_context(|| format!("cannot copy {}", source.display()))?;
            let loader = grub.join("usr/lib/grub/x86_64-efi-signed/grubx64.efi.signed");
            self.make_bootable(&Distribution::in_directory(&distribution).disk, &loader, &files.disk)
        });
        self.progress.end();
        dir
    }

    /// Makes the disk from an image of a root file system and a boot loader.
    fn make_bootable(&self, root: &Path, loader: &Path, disk: &Path) -> Result<()> {
        self.need_packages("to make a disk that firmware boots", &["fdisk", "dosfstools", "mtools"])?;
        self.progress.show("making a disk that firmware boots");
        let failed = || format!("cannot create {}", disk.display());
        let mut root_file = File::open(root).with_context(|| format!("cannot open {}", root.display()))?;
        let root_len = root_file.metadata().with_context(failed)?.len().next_multiple_of(MIB);
        let mut image = File::create(disk).with_context(failed)?;
        image.set_len(ROOT_START + root_len + TABLE_LEN).with_context(failed)?;
        let table = format!(
            "label: gpt\nstart=1MiB, size={}MiB, type=uefi\nstart={}MiB, size={}MiB, type=linux\n",
            ESP_LEN / MIB,
            ROOT_START / MIB,
            root_len / MIB
        );
        self.filter(Command::new("/sbin/sfdisk").arg("--quiet").arg(disk), table.into())?;
        let work = tempfile::tempdir().with_context(failed)?;
        let partition = self.make_esp(loader, work.path())?;
        let bytes = fs::read(&partition).with_context(failed)?;
        ensure!(bytes.len() as u64 == ESP_LEN, "{} must have {ESP_LEN} bytes", partition.display());
        image.write_all_at(&bytes, MIB).with_context(failed)?;
        image.seek(SeekFrom::Start(ROOT_START)).with_context(failed)?;
        copy(&mut root_file, &mut image).with_context(failed)?;
        image.flush().with_context(failed)
    }

    /// Makes the image of an EFI system partition in a directory.
    fn make_esp(&self, loader: &Path, dir: &Path) -> Result<PathBuf> {
        let (image, script) = (dir.join("esp"), dir.join("grub.cfg"));
        let failed = || format!("cannot create {}", image.display());
        fs::write(&script, boot_script()).with_context(failed)?;
        File::create(&image).and_then(|file| file.set_len(ESP_LEN)).with_context(failed)?;
        self.output(Command::new("/sbin/mkfs.vfat").args(["-F", "32", "-n", "ESP"]).arg(&image))?;
        self.run(Command::new("mmd").arg("-i").arg(&image).args(["::EFI", "::EFI/BOOT", "::EFI/debian"]))?;
        // Firmware searches for EFI/BOOT/BOOTX64.EFI. Debian's loader searches for EFI/debian/grub.cfg.
        for (source, target) in [(loader, "::EFI/BOOT/BOOTX64.EFI"), (&script, "::EFI/debian/grub.cfg")] {
            self.run(Command::new("mcopy").arg("-i").arg(&image).arg(source).arg(target))?;
        }
        Ok(image)
    }
}

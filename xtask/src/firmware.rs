// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Firmware for guests, and a disk that it boots: the Debian of [`crate::distribution`] behind a boot loader of its own.

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write, copy};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::distribution::{Distribution, LABEL};
use crate::key::Key;
use crate::tools::Tools;

/// What partitions begin and end at, in bytes.
const MIB: u64 = 1 << 20;
/// Bytes of the EFI system partition, which begins behind the first MiB.
const ESP_LEN: u64 = 64 * MIB;
/// Where the root file system's partition begins.
const ROOT_START: u64 = MIB + ESP_LEN;
/// Room for the second table of partitions, at the end.
const TABLE_LEN: u64 = MIB;

/// Files of a machine that boots by firmware. The image is only read: who boots it gives the guest a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Firmware {
    /// EDK2's firmware.
    pub firmware: PathBuf,
    /// Raw image of a disk with a GPT: an EFI system partition with Debian's boot loader, and the root file system.
    pub disk: PathBuf,
}

impl Firmware {
    /// The files of a directory of the cache.
    #[must_use]
    pub fn in_directory(dir: &Path) -> Self {
        Self { firmware: dir.join("CLOUDHV.fd"), disk: dir.join("disk.raw") }
    }
}

/// What the boot loader does. The kernel's name is that of the link which Debian's packages make.
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
    /// The directory of [`Firmware`], made where it is missing. Debian has the firmware in no release before forky, so it comes from the
    /// suite that is never released.
    ///
    /// # Errors
    /// It cannot be made, or a signal came.
    pub fn firmware(&self) -> Result<PathBuf> {
        let (distribution, edk2, grub) = (
            self.distribution()?,
            self.fetch_unstable("cloudhv-efi-x86-64")?,
            self.fetch_deb("grub-efi-amd64-signed")?,
        );
        // A change of how the disk is made needs another number here.
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

    /// Makes the disk of the image of a root file system and a boot loader.
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
        ensure!(bytes.len() as u64 == ESP_LEN, "{} has another length", partition.display());
        image.write_all_at(&bytes, MIB).with_context(failed)?;
        image.seek(SeekFrom::Start(ROOT_START)).with_context(failed)?;
        copy(&mut root_file, &mut image).with_context(failed)?;
        image.flush().with_context(failed)
    }

    /// Makes the image of an EFI system partition, in a directory.
    fn make_esp(&self, loader: &Path, dir: &Path) -> Result<PathBuf> {
        let (image, script) = (dir.join("esp"), dir.join("grub.cfg"));
        let failed = || format!("cannot create {}", image.display());
        fs::write(&script, boot_script()).with_context(failed)?;
        File::create(&image).and_then(|file| file.set_len(ESP_LEN)).with_context(failed)?;
        self.output(Command::new("/sbin/mkfs.vfat").args(["-F", "32", "-n", "ESP"]).arg(&image))?;
        self.run(Command::new("mmd").arg("-i").arg(&image).args(["::EFI", "::EFI/BOOT", "::EFI/debian"]))?;
        // The loader is where firmware looks by itself, and its script where Debian's loader looks.
        for (source, target) in [(loader, "::EFI/BOOT/BOOTX64.EFI"), (&script, "::EFI/debian/grub.cfg")] {
            self.run(Command::new("mcopy").arg("-i").arg(&image).arg(source).arg(target))?;
        }
        Ok(image)
    }
}

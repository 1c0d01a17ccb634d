// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the rig's emulated machine starts from, fetched or built where it is missing: kernel, initramfs and emulator.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::archive::Archive;
use crate::kernel::GuestKernel;
use crate::key::Key;
use crate::modules::{Modules, ORDER};
use crate::packaged_kernel::packaged_kernel;
use crate::tools::Tools;

/// Modules for the machine, of which a kernel may have some built in and lack others. Not `nvme`: the drives are for vfio-pci.
const MODULES: [&str; 22] = [
    "virtio_pci",
    "virtio_console",
    "virtio_blk",
    "9pnet_virtio",
    "9p",
    "overlay",
    "kvm-amd",
    "kvm-intel",
    NEEDED,
    "vfio_iommu_type1",
    "iommufd",
    "tun",
    "veth",
    "macvtap",
    "nfnetlink",
    "xfrm_user",
    "sch_ingress",
    "cls_u32",
    "act_mirred",
    "loop",
    "dm-mod",
    "aer_inject",
];

/// Without this one there is nothing to test.
const NEEDED: &str = "vfio-pci";

/// What the machine starts from.
#[derive(Debug, PartialEq, Eq)]
pub struct Boot {
    /// Its kernel.
    pub kernel: PathBuf,
    /// The initramfs, to which another one can be appended.
    pub initramfs: PathBuf,
    /// Parameters that this kernel needs besides.
    pub parameters: &'static str,
}

impl Tools<'_> {
    /// The program that runs a command in the emulated machine, built.
    pub(crate) fn rig_command(&self) -> Result<Command> {
        self.build("the rig", &["build", "--locked", "--workspace", "--bin", "rig"])?;
        Ok(Command::new(self.target_dir()?.join("debug/rig")))
    }

    /// Debian's stock kernel, or the package that `CAROM_L1_KERNEL_PACKAGE` names.
    ///
    /// # Errors
    /// It cannot be had, or a signal came.
    pub fn rig_debian(&self) -> Result<Boot> {
        let package = match env::var("CAROM_L1_KERNEL_PACKAGE") {
            Ok(package) if !package.is_empty() => package,
            _ => self.debian_depends("linux-image-amd64", "linux-image-", |rest| {
                rest.starts_with(|first: char| first.is_ascii_digit())
            })?,
        };
        let dir = self.fetch_deb(&package)?;
        let (kernel, release) = packaged_kernel(&dir)?;
        let modules = Modules::read(&dir.join(Modules::PLACE).join(release))?;
        let initramfs = self.rig_initramfs(&dir, Some(&modules))?;
        Ok(Boot { kernel, initramfs, parameters: "" })
    }

    /// Linux 6.12, built for the rig with IOMMUFD.
    ///
    /// # Errors
    /// As [`Tools::rig_debian`].
    pub fn rig_iommufd(&self) -> Result<Boot> {
        let config = vec![self.checkout.join("scripts/lib/rig-kernel.config")];
        let dir = self.guest_kernel(&GuestKernel { stock: true, config, ..GuestKernel::default() })?;
        let initramfs = self.rig_initramfs(&dir, None)?;
        // All is built in, the NVMe driver too, which is to leave the drives to vfio-pci.
        Ok(Boot { kernel: dir.join("bzImage"), initramfs, parameters: "initcall_blacklist=nvme_init" })
    }

    /// The emulator with its first arguments: `CAROM_L0_QEMU` if that is set, else the mended one, else that of Debian's backports,
    /// not installed. One that is to count instructions is always the mended one. With QEMU 7.2, emulated guests with two vCPUs end in hangs and in panics of the kernel below them, one of a
    /// few runs; with 10.0 as it is, one of some hundred guests ends so. What Debian's needs besides, the system's QEMU has.
    ///
    /// # Errors
    /// There is none that starts, or a signal came.
    pub fn rig_emulator(&self, counting: bool) -> Result<Vec<OsString>> {
        let named = env::var_os("CAROM_L0_QEMU").filter(|named| !counting && !named.is_empty());
        if let Some(named) = named {
            return Ok(vec![named]);
        }
        let data = self.fetch_backport("qemu-system-data")?;
        let seabios = self.fetch_backport("seabios")?;
        let made = if counting { self.counting_qemu() } else { self.mended_qemu() };
        let dir = match made {
            Ok(dir) => dir,
            Err(error) if counting => return Err(error),
            Err(error) => {
                self.go_on()?;
                self.progress.say(&format!("{error:#}"));
                self.progress.say(
                    "the rig's emulator could not be built; going on with Debian's, which ends a guest now and then",
                );
                self.fetch_backport("qemu-system-x86")?.join("usr/bin")
            }
        };
        let words = [
            dir.join("qemu-system-x86_64").into(),
            "-L".into(),
            data.join("usr/share/qemu").into(),
            "-L".into(),
            seabios.join("usr/share/seabios").into(),
        ];
        self.output(Command::new(&words[0]).args(&words[1..]).arg("--version"))
            .context("the emulator does not start; CAROM_L0_QEMU can name another QEMU")?;
        self.progress.end();
        Ok(words.into())
    }

    /// The initramfs for the kernel of the directory `kernel`, whose name says its version.
    fn rig_initramfs(&self, kernel: &Path, modules: Option<&Modules>) -> Result<PathBuf> {
        self.need_command("qemu-system-x86_64", "qemu-system-x86", "the rig's emulator")?;
        let mut busybox = self.need_command("busybox", "busybox-static", "the rig's first program")?;
        if self.succeeds(Command::new("ldd").arg(&busybox)) {
            self.need_packages("a static busybox", &["busybox-static"])?;
            busybox = self.need_command("busybox", "busybox-static", "the rig's first program")?;
        }
        self.need_command("modprobe", "kmod", "the rig's kernel modules")?;
        let init = self.checkout.join("scripts/lib/rig-init");
        let version = kernel.file_name().unwrap_or_default().to_string_lossy();
        // A change of how it is packed, rather than of the parts, needs another number here.
        let key = Key::default().text("recipe 2").text(&version).text(&MODULES.join(" "));
        let key = key.path(&busybox)?.path(&init)?.finish();
        let dir = self.cached("rig-initramfs", &key, |dir| {
            self.progress.show("building the rig's initramfs");
            let mut archive = Archive::default();
            archive.program("bin/busybox", &busybox)?;
            archive.program("init", &init)?;
            match modules {
                Some(modules) => {
                    let has = |name: &str| name == NEEDED || modules.file(name).is_ok();
                    let wanted: Vec<&str> = MODULES.into_iter().filter(|name| has(name)).collect();
                    self.add_modules(&mut archive, modules, &wanted)?;
                }
                None => archive.file(ORDER, Vec::new()),
            }
            let packed = self.filter(Command::new("gzip").arg("-1"), archive.bytes()?)?;
            let file = dir.join("initramfs.gz");
            fs::write(&file, packed).with_context(|| format!("cannot write {}", file.display()))
        })?;
        self.progress.end();
        Ok(dir.join("initramfs.gz"))
    }
}

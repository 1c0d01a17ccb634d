// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Kernel, initramfs and emulator of the rig's machine. Missing files are fetched or built.

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

/// Modules for the machine. A kernel may have some of these modules built in, and may lack others. `nvme` is not in this list, because the
/// drives are for vfio-pci.
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

/// Required module: without it, there is nothing to test.
const NEEDED: &str = "vfio-pci";

/// Files that the machine boots from.
#[derive(Debug, PartialEq, Eq)]
pub struct Boot {
    /// Kernel.
    pub kernel: PathBuf,
    /// Initramfs. Another initramfs can be appended.
    pub initramfs: PathBuf,
    /// Additional parameters that this kernel needs.
    pub parameters: &'static str,
}

impl Tools<'_> {
    /// Builds the program that runs a command in the emulated machine.
    pub(crate) fn rig_command(&self) -> Result<Command> {
        self.build("the rig", &["build", "--locked", "--workspace", "--bin", "rig"])?;
        Ok(Command::new(self.target_dir()?.join("debug/rig")))
    }

    /// Returns Debian's stock kernel, or the kernel of the package that `CAROM_L1_KERNEL_PACKAGE` names.
    ///
    /// # Errors
    /// Fails if the kernel cannot be fetched, or on a signal.
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

    /// Returns Linux 6.12, built for the rig with IOMMUFD.
    ///
    /// # Errors
    /// The same as for [`Tools::rig_debian`].
    pub fn rig_iommufd(&self) -> Result<Boot> {
        let config = vec![self.checkout.join("scripts/lib/rig-kernel.config")];
        let dir = self.guest_kernel(&GuestKernel { stock: true, config, ..GuestKernel::default() })?;
        let initramfs = self.rig_initramfs(&dir, None)?;
        // All drivers are built in. The NVMe driver is disabled, because the drives are for vfio-pci.
        Ok(Boot { kernel: dir.join("bzImage"), initramfs, parameters: "initcall_blacklist=nvme_init" })
    }

    /// Returns the emulator with its first arguments. The first of these programs that is available is used:
    /// - the program in `CAROM_L0_QEMU`, unless instructions are counted,
    /// - the emulator with Carom's fixes, which is always used to count instructions,
    /// - QEMU of Debian's backports, unpacked but not installed. This QEMU uses the libraries that were installed for the system's QEMU.
    ///
    /// With QEMU 7.2, one of every few runs with two vCPUs ends early: the emulated machine hangs, or its kernel panics. With an unmodified
    /// QEMU 10.0, one of every few hundred guests ends early.
    ///
    /// # Errors
    /// Fails if no emulator starts, or on a signal.
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
                    "the rig's emulator could not be built; continuing with Debian's emulator, which sometimes ends a guest",
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
            .context("the emulator does not start; set CAROM_L0_QEMU to another QEMU")?;
        self.progress.end();
        Ok(words.into())
    }

    /// Returns the initramfs for a kernel. The name of the directory `kernel` contains the kernel's version.
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
        // When a change to this code changes the initramfs, increase this number.
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

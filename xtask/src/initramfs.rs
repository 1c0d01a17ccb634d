// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Initramfs of test guests.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::Args;

use crate::archive::Archive;
use crate::kernel::GuestKernel;
use crate::key::Key;
use crate::modules::Modules;
use crate::tools::{Tools, Usage};

/// Modules that a disk behind virtio-iommu needs.
const MODULES: [&str; 4] = ["virtio_pci", "virtio_iommu", "virtio_blk", "nvme"];

const DIRECTORIES: [&str; 11] = ["bin", "dev", "proc", "sys", "tmp", "run", "root", "etc", "modules", "sbin", "usr"];

/// Programs in the initramfs that are compiled from sources in `guest/initramfs`.
const PROGRAMS: [&str; 5] = ["vfio-claim", "nvme-check", "lent-check", "kexec-load", "memory-check"];

/// Debian's static busybox.
const BUSYBOX: &str = "/bin/busybox";

/// Options of an initramfs.
#[derive(Debug, Clone, Default, Args)]
pub struct GuestInitramfs {
    /// The kernel's `lib/modules/VERSION`. Needed if the kernel's drivers are modules.
    #[arg(long, value_name = "DIR")]
    pub modules: Option<PathBuf>,
    /// Additional modules.
    #[arg(long, value_name = "MODULE")]
    pub with: Vec<String>,
}

impl Tools<'_> {
    /// Returns the path of an initramfs. Builds the initramfs if it is missing.
    ///
    /// # Errors
    /// Fails if the initramfs cannot be built, or on a signal.
    pub fn guest_initramfs(&self, wanted: &GuestInitramfs) -> Result<PathBuf> {
        if let Some(dir) = wanted.modules.as_ref().filter(|dir| !dir.join("modules.builtin").is_file()) {
            let dir = dir.display();
            bail!(Usage(format!(
                "--modules: '{dir}' is not a lib/modules/VERSION directory (it has no modules.builtin)"
            )));
        }
        self.need_packages(
            "for the guest's initramfs",
            &["busybox-static", "zstd", "xz-utils", "kmod", "gcc", "libc6-dev"],
        )?;
        let fio = self.guest_fio()?;
        let sources = self.checkout.join("guest/initramfs");
        let modules = wanted.modules.as_deref().map(Modules::read).transpose()?;
        let names: Vec<&str> = MODULES.into_iter().chain(wanted.with.iter().map(String::as_str)).collect();
        // When a change to this code changes the initramfs, increase this number.
        let mut key = Key::default().text("recipe 5").text(&names.join(" ")).path(&sources)?;
        key = key.path(Path::new(BUSYBOX))?.path(&fio)?;
        if let Some(modules) = &modules {
            for name in &names {
                key = match modules.file(name)? {
                    Some(file) => key.text(name).path(file)?,
                    None => key.text(&format!("{name} is built in")),
                };
            }
        }
        let dir = self.cached("guest-initramfs", &key.finish(), |dir| {
            self.progress.show("building the guest's initramfs");
            let archive = self.pack(&sources, &fio, modules.as_ref(), &names)?;
            // Do not compress the archive: in a guest, decompression takes longer than reading the larger file.
            let mut packed = archive.bytes()?;
            // Pad the archive with zeros, which the kernel skips. Another archive can follow only at a multiple of 4 bytes.
            packed.resize(packed.len().next_multiple_of(512), 0);
            let file = dir.join("initramfs");
            fs::write(&file, packed).with_context(|| format!("cannot write {}", file.display()))
        })?;
        self.progress.end();
        Ok(dir.join("initramfs"))
    }

    fn pack(&self, sources: &Path, fio: &Path, modules: Option<&Modules>, names: &[&str]) -> Result<Archive> {
        let mut archive = Archive::default();
        for directory in DIRECTORIES {
            archive.directory(directory);
        }
        for link in ["usr/bin", "usr/sbin"] {
            archive.link(link, "../bin");
        }
        archive.program("init", &sources.join("init"))?;
        archive.program("bin/busybox", Path::new(BUSYBOX))?;
        for applet in self.output(Command::new(BUSYBOX).arg("--list"))?.lines().filter(|applet| *applet != "busybox") {
            archive.link(&format!("bin/{applet}"), "busybox");
        }
        archive.program("bin/fio", fio)?;
        let built = tempfile::tempdir().context("cannot create a directory for the guest's programs")?;
        for name in PROGRAMS {
            let program = built.path().join(name);
            self.run(compile(&program).arg("-Wall").arg(sources.join(format!("{name}.c"))))?;
            archive.program(&format!("bin/{name}"), &program)?;
        }
        let benchmark = built.path().join("dma_map_benchmark");
        self.build_benchmark(built.path(), &benchmark)?;
        archive.program("bin/dma_map_benchmark", &benchmark)?;
        if let Some(modules) = modules {
            self.add_modules(&mut archive, modules, names)?;
        }
        Ok(archive)
    }

    /// Builds the kernel's DMA mapping benchmark from the source of the guest kernel.
    fn build_benchmark(&self, dir: &Path, target: &Path) -> Result<()> {
        let source = self.kernel_source(&GuestKernel { stock: true, ..GuestKernel::default() })?;
        let include = dir.join("include");
        fs::create_dir_all(include.join("linux"))
            .context("cannot create the include directory for linux/map_benchmark.h")?;
        let header = "linux/map_benchmark.h";
        fs::copy(source.join("include").join(header), include.join(header))
            .context("cannot copy linux/map_benchmark.h from the kernel's source")?;
        let source = source.join("tools/testing/selftests/dma/dma_map_benchmark.c");
        self.run(compile(target).arg("-I").arg(include).arg(source))
    }
}

fn compile(target: &Path) -> Command {
    let mut gcc = Command::new("gcc");
    gcc.args(["-O2", "-static", "-s", "-o"]).arg(target);
    gcc
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The module of `guest/module`, built for a kernel that Debian has packaged, by the headers that go with it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::key::Key;
use crate::tools::Tools;

/// The compiler that Debian builds these kernels by, and says so in `.kernelvariables` of their headers.
const COMPILER: &str = "gcc-12";

/// The module's file.
const MODULE: &str = "virtio_iommu_bounce.ko";

/// The protocol, which the guest patch has too.
const PROTOCOL: &str = "guest/src/include/uapi/linux/virtio_iommu_window.h";

impl Tools<'_> {
    /// The module for the kernel of this release, such as `6.1.0-41-amd64`.
    pub(crate) fn packaged_kernel_module(&self, release: &str) -> Result<PathBuf> {
        self.need_command(COMPILER, COMPILER, "building a module for a guest's kernel")?;
        self.need_packages("building a module for a guest's kernel", &["make", "binutils"])?;
        let headers = format!("linux-headers-{release}");
        let common = common_headers(&headers);
        let programs = self.debian_depends(&headers, "linux-kbuild-", |_| true)?;
        let packages = [&headers, &common, &programs]
            .into_iter()
            .map(|package| self.fetch_deb(package))
            .collect::<Result<Vec<_>>>()?;
        let (sources, protocol) = (self.checkout.join("guest/module"), self.checkout.join(PROTOCOL));
        // A change of how it is built, rather than of what from, needs another number here.
        let mut key = Key::default().text("recipe 1").path(&sources)?.path(&protocol)?;
        for package in &packages {
            key = key.text(&package.file_name().unwrap_or_default().to_string_lossy());
        }
        let dir = self.cached("guest-module", &key.finish(), |dir| {
            self.progress.show(&format!("building the guest's module for Linux {release}"));
            let work = tempfile::tempdir_in(dir).with_context(|| format!("making a directory in {}", dir.display()))?;
            let (tree, module) = (work.path().join("tree"), work.path().join("module"));
            merge(self, &packages, &tree)?;
            // The package's own names the place where the other one is when installed.
            let kernel = tree.join("usr/src").join(&headers);
            let makefile = format!("include {}\n", tree.join("usr/src").join(&common).join("Makefile").display());
            fs::write(kernel.join("Makefile"), makefile).context("writing the kernel's Makefile")?;
            self.run(Command::new("cp").arg("-r").arg(&sources).arg(&module))?;
            let include = module.join("include");
            fs::create_dir_all(&include).context("making a directory for a header")?;
            fs::copy(&protocol, include.join("virtio_iommu_window.h")).context("copying the protocol's header")?;
            let mut make = Command::new("make");
            make.arg("-C").arg(&kernel).arg(format!("M={}", module.display()));
            // Types for BPF would need another package's program. Warnings are errors.
            make.args(["W=1", "KCFLAGS=-Werror", "CONFIG_DEBUG_INFO_BTF_MODULES=", "modules"]);
            self.run_quietly(&mut make, &dir.join("log"))?;
            self.run(Command::new("strip").arg("-g").arg("-o").arg(dir.join(MODULE)).arg(module.join(MODULE)))
        })?;
        Ok(dir.join(MODULE))
    }
}

/// Puts unpacked packages into one tree, within which they refer to each other.
fn merge(tools: &Tools<'_>, packages: &[PathBuf], tree: &Path) -> Result<()> {
    fs::create_dir(tree).with_context(|| format!("making {}", tree.display()))?;
    for package in packages {
        let mut copy = Command::new("cp");
        tools.run(copy.args(["-a", "--reflink=auto"]).arg(package.join("usr")).arg(tree))?;
    }
    Ok(())
}

/// The package of headers that kernels of a version have in common.
fn common_headers(headers: &str) -> String {
    let version = headers.rsplit_once('-').map_or(headers, |(version, _)| version);
    format!("{version}-common")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_of_an_architecture_go_with_those_of_all() {
        assert_eq!(common_headers("linux-headers-6.1.0-41-amd64"), "linux-headers-6.1.0-41-common");
        assert_eq!(common_headers("linux-headers-6.12.9+deb12-amd64"), "linux-headers-6.12.9+deb12-common");
    }

    #[test]
    fn module_is_called_as_its_kbuild_says() {
        let kbuild = fs::read_to_string(crate::checkout().join("guest/module/Kbuild")).unwrap();
        assert!(kbuild.contains(&MODULE.replace(".ko", ".o")), "{kbuild}");
    }
}

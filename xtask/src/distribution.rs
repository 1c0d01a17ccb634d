// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Debian system for guests: a disk image that mmdebstrap makes from packages, and Debian's kernel with its initrd.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use rustix::process::geteuid;

use crate::apt::{SUITE, only_file};
use crate::key::Key;
use crate::tools::Tools;

/// Label of the file system. `guest/distribution/customize` names it too.
pub(crate) const LABEL: &str = "debian";

/// Free space in the image, in MiB. At boot, the file system grows to the size of its disk.
const ROOM: u64 = 96;

/// Files of a bootable Debian. The image is read-only: give each guest a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Distribution {
    /// Raw disk image. The image is an ext4 file system without partitions.
    pub disk: PathBuf,
    /// Debian's kernel.
    pub kernel: PathBuf,
    /// The initrd of that kernel.
    pub initrd: PathBuf,
}

impl Distribution {
    /// Kernel parameters for the root file system.
    pub const ROOT: &str = "root=/dev/vda rw";

    /// Returns the paths of the distribution's files in `dir`, which is a directory of the cache.
    #[must_use]
    pub fn in_directory(dir: &Path) -> Self {
        let file = |name: &str| dir.join(name);
        Self { disk: file("disk.raw"), kernel: file("vmlinuz"), initrd: file("initrd.img") }
    }
}

impl Tools<'_> {
    /// Returns the directory of the distribution. If the directory is missing, makes the distribution from the newest packages. Later calls
    /// return the same directory until the list of packages or the recipe changes.
    ///
    /// # Errors
    /// Fails if the distribution cannot be made, or on a signal.
    pub fn distribution(&self) -> Result<PathBuf> {
        let recipe = self.checkout.join("guest/distribution");
        // When a change to this code changes the image, increase this number. The key already depends on the recipe directory.
        let key = Key::default().text("recipe 1").text(SUITE).text(LABEL).text(&ROOM.to_string());
        let dir = self.cached("distribution", &key.path(&recipe)?.finish(), |dir| self.make_distribution(&recipe, dir));
        self.progress.end();
        dir
    }

    fn make_distribution(&self, recipe: &Path, dir: &Path) -> Result<()> {
        self.need_packages("to make a Debian root file system", &["perl", "python3-minimal", "e2fsprogs"])?;
        if !geteuid().is_root() {
            self.need_packages("to make a root file system without being root", &["fakeroot", "uidmap"])?;
        }
        let archive = dir.join("root.tar");
        self.bootstrap(recipe, dir, &archive)?;
        self.progress.show("making the image of the distribution's disk");
        let (tree, files) = (dir.join("tree"), Distribution::in_directory(dir));
        fs::create_dir(&tree).with_context(|| format!("cannot create {}", tree.display()))?;
        // Only root, or a program under fakeroot, can restore the owners of files and the device nodes of the archive.
        let script = "set -eu; tar -C \"$1\" --numeric-owner -xf \"$2\"; used=$(du -sm \"$1\" | cut -f1)
            mke2fs -q -t ext4 -L \"$4\" -m 0 -E lazy_itable_init=0,lazy_journal_init=0 -d \"$1\" \"$3\" $((used + used / 8 + $5))M";
        let mut pack = Command::new(if geteuid().is_root() { "sh" } else { "fakeroot" });
        if !geteuid().is_root() {
            pack.arg("sh");
        }
        pack.args(["-c", script, "sh"]).arg(&tree).arg(&archive).arg(&files.disk).args([LABEL, &ROOM.to_string()]);
        self.run_quietly(pack.env("PATH", path_with_sbin()), &dir.join("log"))?;
        for (start, target) in [("vmlinuz-", &files.kernel), ("initrd.img-", &files.initrd)] {
            let source = only_file(&tree.join("boot"), |name| name.starts_with(start))?;
            fs::copy(&source, target).with_context(|| format!("cannot copy {}", source.display()))?;
        }
        fs::remove_dir_all(&tree).with_context(|| format!("cannot remove {}", tree.display()))?;
        fs::remove_file(&archive).with_context(|| format!("cannot remove {}", archive.display()))
    }

    /// Runs mmdebstrap, which makes an archive of the root file system. mmdebstrap is unpacked, not installed.
    fn bootstrap(&self, recipe: &Path, dir: &Path, archive: &Path) -> Result<()> {
        let program = self.fetch_deb("mmdebstrap")?.join("usr/bin/mmdebstrap");
        let list = recipe.join("packages");
        let text = fs::read_to_string(&list).with_context(|| format!("cannot read {}", list.display()))?;
        let packages = packages(&text);
        ensure!(!packages.is_empty(), "{} lists no package", list.display());
        let sources = dir.join("sources.list");
        fs::write(&sources, self.guest_sources()?).with_context(|| format!("cannot write {}", sources.display()))?;
        let mut command = Command::new("perl");
        command.arg(program).args(["--variant=minbase", "--format=tar"]);
        command.arg(if geteuid().is_root() { "--mode=root" } else { "--mode=unshare" });
        for option in ["APT::Install-Recommends \"false\"", "Acquire::Languages \"none\""] {
            command.arg(format!("--aptopt={option}"));
        }
        command.arg(format!("--include={}", packages.join(",")));
        for (hook, name) in [("essential", "prepare"), ("customize", "customize")] {
            command.arg(format!("--{hook}-hook={}", recipe.join(name).display()));
        }
        command.arg(SUITE).arg(archive).arg(&sources);
        command.env("PATH", path_with_sbin());
        self.progress.show("making a Debian root file system (once, two minutes)");
        self.run_watched(&mut command, &dir.join("log"), |line| {
            if let Some(step) = line.strip_prefix("I: ") {
                self.progress.show(&format!("making a Debian root file system: {step}"));
            }
        })
    }
}

/// Returns `PATH` with the directories of root's programs added. An unprivileged user's `PATH` may lack these directories, but mmdebstrap
/// and mke2fs need them.
fn path_with_sbin() -> String {
    let path = std::env::var("PATH").unwrap_or_default();
    format!("{path}:/usr/local/sbin:/usr/sbin:/sbin")
}

/// Returns the packages of a list. Each line has one package; comments and empty lines are ignored.
fn packages(text: &str) -> Vec<&str> {
    text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_of_packages_has_comments() {
        assert_eq!(packages("# a comment\n\nudev\n  dbus \n"), ["udev", "dbus"]);
    }

    #[test]
    fn recipe_names_a_kernel_with_a_virtio_iommu_and_the_label() {
        let recipe = crate::checkout().join("guest/distribution");
        let list = fs::read_to_string(recipe.join("packages")).unwrap();
        assert!(packages(&list).iter().any(|package| package.starts_with("linux-image-6.12")));
        let customize = fs::read_to_string(recipe.join("customize")).unwrap();
        assert!(customize.contains(&format!("LABEL={LABEL} /")), "{customize}");
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Copy of Debian's kernel source for the checks, and builds of the objects that the patch touches. make recompiles only changed files.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::available_parallelism;

use anyhow::{Context, Result, ensure};

use crate::key::files_below;
use crate::tools::Tools;

/// Directory that is built completely.
const DIRECTORY: &str = "drivers/iommu/";

/// Objects outside [`DIRECTORY`] that are built if the patches touch their sources. A series may lack some of these objects.
const OBJECTS: [&str; 8] = [
    "block/blk-mq",
    "block/blk-mq-dma",
    "drivers/gpu/drm/i915/gem/i915_gem_dmabuf",
    "drivers/gpu/drm/i915/i915_gem_gtt",
    "drivers/nvme/host/pci",
    "drivers/virtio/virtio_pci_common",
    "kernel/dma/mapping",
    "kernel/dma/swiotlb",
];

/// Options that enable i915 and the tests of the guest patch. i915 uses one of the patch's attributes in two objects.
const MORE_OPTIONS: &str =
    "CONFIG_DRM=y\nCONFIG_DRM_I915=y\nCONFIG_IOMMU_DMA_BOUNCE_TEST=y\nCONFIG_IOMMU_DMA_BOUNCE_KUNIT_TEST=y\n";

/// Options that kernels of small machines disable. The patch must build without them.
const WITHOUT: &str = "CONFIG_SMP=n\nCONFIG_NUMA=n\nCONFIG_ZONE_DEVICE=n\nCONFIG_PCI_P2PDMA=n\nCONFIG_MEMORY_HOTPLUG=n\n\
    CONFIG_VIRTIO_MEM=n\nCONFIG_DEBUG_FS=n\nCONFIG_BLK_DEV_INTEGRITY=n\nCONFIG_TRANSPARENT_HUGEPAGE=n\n";

/// Kind of build: with or without bouncing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    On,
    /// With bouncing, in a kernel with few other options.
    Bare,
    Off,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::On => "on",
            Self::Bare => "bare",
            Self::Off => "off",
        })
    }
}

pub(super) struct CheckTree<'a> {
    pub(super) tools: &'a Tools<'a>,
    pristine: PathBuf,
    /// Directory of this kernel's work trees.
    pub(super) work: PathBuf,
    pub(super) patches: PathBuf,
    pub(super) tree: PathBuf,
    /// Files that the applied patches touched.
    pub(super) touched: BTreeSet<String>,
}

impl<'a> CheckTree<'a> {
    pub(super) fn new(tools: &'a Tools<'a>, pristine: PathBuf, work: PathBuf, patches: PathBuf) -> Self {
        let tree = work.join("check");
        Self { tools, pristine, work, patches, tree, touched: BTreeSet::new() }
    }

    /// Returns the patches of mainline files, in their order.
    pub(super) fn hooks(&self) -> Result<Vec<PathBuf>> {
        let files = files_below(&self.patches)?.into_iter().map(|(file, _)| self.patches.join(file));
        let mut hooks: Vec<PathBuf> =
            files.filter(|file| file.extension().is_some_and(|kind| kind == "patch")).collect();
        hooks.sort();
        Ok(hooks)
    }

    /// Makes a fresh copy of Debian's source with hard links. patch(1) replaces a file instead of writing to it, so Debian's source stays
    /// unchanged.
    pub(super) fn fresh(&mut self) -> Result<()> {
        self.tools.progress.show("preparing a source tree");
        self.touched.clear();
        self.renew()
    }

    /// Does the same as [`CheckTree::fresh`], but keeps the list of touched files.
    pub(super) fn renew(&self) -> Result<()> {
        self.tools.run(Command::new("rm").arg("-rf").arg(&self.tree))?;
        self.tools.run(Command::new("cp").arg("-al").arg(&self.pristine).arg(&self.tree))
    }

    pub(super) fn apply(&mut self, patch: &Path) -> Result<()> {
        self.tools.patch(&self.tree, patch)?;
        let text = fs::read_to_string(patch).with_context(|| format!("cannot read {}", patch.display()))?;
        self.touched.extend(added_files(&text).map(String::from));
        Ok(())
    }

    /// Makes a copy of Debian's source with the files of `guest/src` and the hooks.
    pub(super) fn patch_all(&mut self) -> Result<()> {
        self.fresh()?;
        let source = self.tools.checkout.join("guest/src");
        self.tools.run(Command::new("cp").arg("-r").arg(source.join(".")).arg(&self.tree))?;
        for hook in self.hooks()? {
            let text = fs::read_to_string(&hook).with_context(|| format!("cannot read {}", hook.display()))?;
            if added_files(&text).next().is_some() {
                self.apply(&hook)?;
            }
        }
        self.touched.extend(files_below(&source)?.into_iter().map(|(file, _)| file.to_string_lossy().into_owned()));
        Ok(())
    }

    /// Configures a build. allnoconfig ignores options that the tree does not know.
    pub(super) fn configure(&self, mode: Mode) -> Result<()> {
        let out = self.out(mode);
        fs::create_dir_all(&out).with_context(|| format!("cannot create {}", out.display()))?;
        let base = self.tools.checkout.join("guest/config/6.12.config");
        let base = fs::read_to_string(&base).with_context(|| format!("cannot read {}", base.display()))?;
        let mut options: String = base
            .lines()
            .filter(|line| !line.starts_with("CONFIG_BLK_DEV_INITRD"))
            .map(|line| format!("{line}\n"))
            .collect();
        options += MORE_OPTIONS;
        options += if mode == Mode::Off { "CONFIG_IOMMU_DMA_BOUNCE=n\n" } else { "CONFIG_IOMMU_DMA_BOUNCE=y\n" };
        options += if mode == Mode::Bare { WITHOUT } else { "" };
        let fragment = self.work.join(format!("check-{mode}.fragment"));
        fs::write(&fragment, options).with_context(|| format!("cannot write {}", fragment.display()))?;
        let mut make = self.make(mode);
        make.args(["-s", &format!("KCONFIG_ALLCONFIG={}", fragment.display()), "allnoconfig"]);
        self.tools.run_quietly(&mut make, &self.log(mode)).context("cannot configure the kernel")
    }

    /// Builds [`DIRECTORY`] and the touched objects. Does not build files that no Makefile names yet.
    pub(super) fn build(&self, mode: Mode, arguments: &[&str]) -> Result<()> {
        let left_out = not_built(self.touched.iter().map(String::as_str));
        ensure!(
            left_out.is_empty(),
            "no check builds these touched sources: {}; add them to OBJECTS in xtask/src/check/tree.rs",
            left_out.join(", ")
        );
        let is_touched = |name: &&str| self.touched.contains(&format!("{name}.c"));
        let objects = OBJECTS.iter().copied().filter(is_touched).map(|name| format!("{name}.o"));
        let all: Vec<String> = [DIRECTORY.to_owned()].into_iter().chain(objects).collect();
        self.build_only(mode, arguments, &all)
    }

    pub(super) fn build_only(&self, mode: Mode, arguments: &[&str], objects: &[String]) -> Result<()> {
        let mut make = self.make(mode);
        make.arg(jobs()).args(arguments).args(objects);
        self.tools.run_quietly(&mut make, &self.log(mode)).context("cannot build the kernel")
    }

    /// Returns the last build's warnings and errors about touched files.
    pub(super) fn complaints(&self, mode: Mode) -> Result<Vec<String>> {
        let log = fs::read(self.log(mode)).context("cannot read a build's log")?;
        let log = String::from_utf8_lossy(&log);
        let complaints = log.lines().filter(|line| line.contains("warning:") || line.contains("error:"));
        Ok(complaints.filter(|line| self.is_of_touched(line)).map(|line| self.short(line)).collect())
    }

    pub(super) fn is_of_touched(&self, line: &str) -> bool {
        self.touched.iter().any(|file| line.contains(file.as_str()))
    }

    /// Returns a message without the path of the tree.
    pub(super) fn short(&self, line: &str) -> String {
        line.replace(&format!("{}/", self.tree.display()), "")
    }

    pub(super) fn make(&self, mode: Mode) -> Command {
        let mut make = Command::new("nice");
        make.args(["-n", "5", "make", "-C"]).arg(&self.tree).arg(format!("O={}", self.out(mode).display()));
        make
    }

    pub(super) fn object(&self, mode: Mode, name: &str) -> PathBuf {
        self.out(mode).join(name)
    }

    fn out(&self, mode: Mode) -> PathBuf {
        self.work.join(format!("check-{mode}"))
    }

    fn log(&self, mode: Mode) -> PathBuf {
        self.work.join(format!("check-{mode}.log"))
    }
}

impl Drop for CheckTree<'_> {
    fn drop(&mut self) {
        // If this fails, the next check replaces the tree anyway.
        let _ = fs::remove_dir_all(&self.tree);
    }
}

pub(super) fn jobs() -> String {
    format!("-j{}", available_parallelism().map_or(1, usize::from))
}

/// Returns the files that a patch changes or adds.
pub(super) fn added_files(patch: &str) -> impl Iterator<Item = &str> {
    patch.lines().filter_map(|line| line.strip_prefix("+++ b/")?.split_whitespace().next())
}

/// Returns the C sources among these files that [`CheckTree::build`] does not compile.
fn not_built<'file>(files: impl Iterator<Item = &'file str>) -> Vec<&'file str> {
    let is_built = |source: &str| source.starts_with(DIRECTORY) || OBJECTS.contains(&source);
    files.filter(|file| file.strip_suffix(".c").is_some_and(|source| !is_built(source))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mails::steps;

    #[test]
    fn files_that_exist_after_a_patch_are_found() {
        let patch = "--- a/one.c\n+++ b/one.c\n--- /dev/null\n+++ b/new.c\t2026\n--- a/gone.c\n+++ /dev/null\n";
        assert_eq!(added_files(patch).collect::<Vec<_>>(), ["one.c", "new.c"]);
    }

    #[test]
    fn touched_source_without_a_build_is_named() {
        let patch = "--- a/kernel/dma/direct.c\n+++ b/kernel/dma/direct.c\n--- a/kernel/dma/mapping.c\n+++ b/kernel/dma/mapping.c\n\
                     --- /dev/null\n+++ b/drivers/iommu/new.c\n--- a/include/linux/iommu.h\n+++ b/include/linux/iommu.h\n\
                     --- a/kernel/dma/remap.c\n+++ /dev/null\n";
        assert_eq!(not_built(added_files(patch)), ["kernel/dma/direct.c"]);
    }

    #[test]
    fn every_source_that_a_series_touches_is_built() {
        let patches = crate::checkout().join("guest/patches");
        for series in ["6.12", "7.3"] {
            let dir = patches.join(series);
            for step in steps(&dir).unwrap() {
                let text = fs::read_to_string(dir.join(&step.patch)).unwrap();
                assert!(not_built(added_files(&text)).is_empty(), "{series}: {}", step.patch);
            }
        }
    }
}

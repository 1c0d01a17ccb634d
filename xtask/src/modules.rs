// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Kernel modules for an initramfs: the wanted modules and their dependencies, in load order.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::archive::Archive;
use crate::key::files_below;
use crate::tools::Tools;

/// Path of the file that lists the modules in load order, in an initramfs.
pub(crate) const ORDER: &str = "modules/order";

/// Modules of one kernel, in a directory `lib/modules/VERSION`.
#[derive(Debug)]
pub(crate) struct Modules {
    directory: PathBuf,
    files: Vec<PathBuf>,
    builtin: String,
}

impl Modules {
    /// Directory of modules in a kernel package.
    pub(crate) const PLACE: &str = "lib/modules";

    pub(crate) fn read(directory: &Path) -> Result<Self> {
        let list = directory.join("modules.builtin");
        let builtin = fs::read_to_string(&list).with_context(|| format!("cannot read {}", list.display()))?;
        let mut files: Vec<_> = files_below(directory)?.into_iter().map(|(name, _)| directory.join(name)).collect();
        files.sort();
        Ok(Self { directory: directory.into(), files, builtin })
    }

    /// Returns the file of a module, or `None` if it is built into the kernel.
    ///
    /// # Errors
    /// Fails if the kernel has no such module.
    pub(crate) fn file(&self, name: &str) -> Result<Option<&Path>> {
        let is_it = |path: &Path| module_name(path).is_some_and(|known| same(known, name));
        if let Some(file) = self.files.iter().find(|file| is_it(file)) {
            return Ok(Some(file));
        }
        if self.builtin.lines().any(|line| is_it(Path::new(line))) {
            return Ok(None);
        }
        bail!("kernel {} has no module {name}", self.directory.file_name().unwrap_or_default().display())
    }
}

impl Tools<'_> {
    /// Adds modules with their dependencies, and the file with the load order.
    pub(crate) fn add_modules(&self, archive: &mut Archive, modules: &Modules, wanted: &[&str]) -> Result<()> {
        let mut order = String::new();
        for name in wanted {
            self.add_module(archive, modules, name, &mut order)?;
        }
        archive.file(ORDER, order.into_bytes());
        Ok(())
    }

    fn add_module(&self, archive: &mut Archive, modules: &Modules, name: &str, order: &mut String) -> Result<()> {
        let Some(file) = modules.file(name)? else { return Ok(()) };
        let name = format!("{}.ko", module_name(file).unwrap_or_default());
        let path = format!("modules/{name}");
        if archive.has(&path) {
            return Ok(());
        }
        let needs = self.output(Command::new("/sbin/modinfo").args(["-F", "depends"]).arg(file))?;
        for need in needs.trim().split(',').filter(|need| !need.is_empty()) {
            self.add_module(archive, modules, need, order)?;
        }
        let bytes = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
        let bytes = match file.extension().and_then(|extension| extension.to_str()) {
            Some("xz") => self.filter(Command::new("xz").arg("-dc"), bytes)?,
            Some("zst") => self.filter(Command::new("zstd").arg("-qdc"), bytes)?,
            _ => bytes,
        };
        archive.file(&path, bytes);
        order.push_str(&name);
        order.push('\n');
        Ok(())
    }
}

/// Returns `NAME` if the path is `…/NAME.ko`, or `…/NAME.ko` with a suffix such as `.xz`.
fn module_name(path: &Path) -> Option<&str> {
    let (name, rest) = path.file_name()?.to_str()?.split_once(".ko")?;
    (rest.is_empty() || rest.starts_with('.')).then_some(name)
}

/// True if two module names are equal. The kernel treats `-` and `_` alike.
fn same(one: &str, other: &str) -> bool {
    one.len() == other.len() && one.replace('-', "_") == other.replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn module_is_a_file_or_built_in_or_missing() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("kernel")).unwrap();
        fs::write(dir.path().join("kernel/vfio-pci.ko.xz"), "").unwrap();
        fs::write(dir.path().join("modules.builtin"), "kernel/drivers/virtio/virtio_pci.ko\n").unwrap();

        let modules = Modules::read(dir.path()).unwrap();

        assert_eq!(modules.file("vfio_pci").unwrap(), Some(dir.path().join("kernel/vfio-pci.ko.xz").as_path()));
        assert_eq!(modules.file("virtio_pci").unwrap(), None);
        assert!(modules.file("vfio").is_err());
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Debian packages of a kernel and its headers, made by the kernel's own rules (`make bindeb-pkg`).

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::Inputs;
use crate::apt::SUITE;
use crate::files::copy;
use crate::tools::Tools;

/// Debian packages that `make bindeb-pkg` needs, in addition to those that every kernel needs.
pub(super) const PACKAGES: [&str; 7] = ["debhelper", "dpkg-dev", "rsync", "kmod", "cpio", "openssl", "python3-minimal"];

/// First part of the names of the wanted packages. `make bindeb-pkg` also makes `linux-libc-dev`, which would replace Debian's package.
const WANTED: [&str; 2] = ["linux-image-", "linux-headers-"];

/// Number of lines that make prints.
const LINES: u32 = 13500;

impl Tools<'_> {
    /// Builds the packages of `tree` in `out` and copies the wanted packages to `dir`.
    pub(super) fn build_deb(&self, tree: &Path, out: &Path, inputs: &Inputs, dir: &Path) -> Result<()> {
        // make writes the packages to the parent directory of the build directory.
        let build = out.join("build");
        fs::create_dir_all(&build).with_context(|| format!("cannot create {}", build.display()))?;
        self.configure(tree, &build, inputs)?;
        for old in packages_in(out)? {
            fs::remove_file(&old).with_context(|| format!("cannot remove {}", old.display()))?;
        }
        let mut make = self.make(tree, &build, inputs.architecture);
        make.arg("bindeb-pkg");
        make.envs([("KDEB_PKGVERSION", version(inputs.version()).as_str()), ("KDEB_CHANGELOG_DIST", SUITE)]);
        self.run_make(&mut make, &build, LINES)?;
        let made = packages_in(out)?;
        for start in WANTED {
            let package = made.iter().find(|file| name_starts_with(file, start));
            let package = package.with_context(|| format!("make bindeb-pkg made no package {start}*"))?;
            copy(package, &dir.join(package.file_name().unwrap_or_default()))?;
        }
        copy(&build.join(".config"), &dir.join("config"))
    }
}

/// Returns the version of the packages. `source` is the name and the version of Debian's source package, such as
/// `linux-source-6.12_6.12.9-1`.
fn version(source: &str) -> String {
    let version = source.split_once('_').map_or(source, |(_, version)| version);
    format!("{version}+carom")
}

fn packages_in(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    Ok(entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|file| file.extension().is_some_and(|end| end == "deb"))
        .collect())
}

fn name_starts_with(file: &Path, start: &str) -> bool {
    file.file_name().is_some_and(|name| name.to_string_lossy().starts_with(start))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_have_debians_version_with_a_suffix() {
        assert_eq!(version("linux-source-6.12_6.12.9-1~deb12u1"), "6.12.9-1~deb12u1+carom");
    }

    #[test]
    fn only_packages_are_found() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["linux-image-1_1_amd64.deb", "linux-1.changes", "linux-libc-dev_1_amd64.deb"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        let found = packages_in(dir.path()).unwrap();
        assert_eq!(found.len(), 2, "{found:?}");
        let wanted = |file: &&PathBuf| WANTED.iter().any(|start| name_starts_with(file, start));
        assert_eq!(found.iter().filter(wanted).count(), 1, "{found:?}");
    }
}

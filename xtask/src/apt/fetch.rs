// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What is in the lists, and packages from there into the cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::{BACKPORTS, Lists, SUITE, UNSTABLE, plain};
use crate::tools::Tools;

impl Tools<'_> {
    /// The first dependency of a package whose name starts like this, and goes on with what `rest` accepts: from a meta package such
    /// as linux-image-amd64 to the package of the day.
    pub(crate) fn debian_depends(&self, package: &str, prefix: &str, rest: fn(&str) -> bool) -> Result<String> {
        self.answer(Lists::Stable, &format!("depends-{package}-{prefix}"), || {
            let said = self.output(self.apt(Lists::Stable, "apt-cache").args(["depends", "--important", package]))?;
            let found = depends(&said).find(|name| name.strip_prefix(prefix).is_some_and(rest));
            found
                .map(String::from)
                .with_context(|| format!("Debian package {package} depends on nothing like {prefix}"))
        })
    }

    /// Downloads a Debian package, the newest of bookworm, its updates and security, unpacks it into the cache without installing it,
    /// and returns the directory.
    pub(crate) fn fetch_deb(&self, package: &str) -> Result<PathBuf> {
        self.fetch_newest(Lists::Stable, package)
    }

    /// The same of the suite that is never released.
    pub(crate) fn fetch_unstable(&self, package: &str) -> Result<PathBuf> {
        self.fetch_newest(Lists::Unstable, package)
    }

    fn fetch_newest(&self, lists: Lists, package: &str) -> Result<PathBuf> {
        let version = self.answer(lists, &format!("candidate-{package}"), || self.candidate(lists, package, None))?;
        self.fetch_version(lists, package, &version)
    }

    /// The same of the backports.
    pub(crate) fn fetch_backport(&self, package: &str) -> Result<PathBuf> {
        let name = format!("candidate-{package}-{BACKPORTS}");
        let version = self.answer(Lists::Stable, &name, || self.candidate(Lists::Stable, package, Some(BACKPORTS)))?;
        self.fetch_version(Lists::Stable, package, &version)
    }

    /// The newest version of a source package of the backports.
    pub(crate) fn source_version(&self, package: &str) -> Result<String> {
        self.answer(Lists::Stable, &format!("source-{package}"), || {
            let said = self.output(self.apt(Lists::Stable, "apt-cache").args(["showsrc", "--only-source", package]))?;
            let versions = said.lines().filter_map(|line| line.strip_prefix("Version: "));
            let sorted =
                self.filter(Command::new("sort").arg("-rV"), versions.collect::<Vec<_>>().join("\n").into())?;
            let newest = String::from_utf8_lossy(&sorted).lines().next().unwrap_or_default().to_owned();
            (!newest.is_empty())
                .then_some(newest)
                .with_context(|| format!("Debian {BACKPORTS} has no source package {package}"))
        })
    }

    /// Downloads the original source of a Debian source package (its checksum is in the signed lists) and unpacks it as `dir`,
    /// without Debian's changes.
    pub(crate) fn fetch_source(&self, package: &str, version: &str, dir: &Path) -> Result<()> {
        fs::create_dir(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let name = format!("{package}={version}");
        let mut fetch = self.apt(Lists::Stable, "apt-get");
        self.run(fetch.args(["source", "-qq", "--tar-only", "--download-only", &name]).current_dir(dir))?;
        let archive = only_file(dir, |name| name.contains(".orig.tar."))?;
        self.run(Command::new("tar").arg("-C").arg(dir).arg("-xf").arg(&archive).arg("--strip-components=1"))?;
        fs::remove_file(&archive).with_context(|| format!("cannot remove {}", archive.display()))
    }

    /// Backports are not candidates unless asked for by their suite.
    fn candidate(&self, lists: Lists, package: &str, suite: Option<&str>) -> Result<String> {
        let mut ask = self.apt(lists, "apt-cache");
        if let Some(suite) = suite {
            ask.args(["-t", suite]);
        }
        let said = self.output(ask.args(["policy", package]))?;
        let read = match lists {
            Lists::Stable => suite.unwrap_or(SUITE),
            Lists::Unstable => UNSTABLE,
        };
        let missing = || format!("Debian {read} has no package {package}");
        candidate(&said).map(String::from).with_context(missing)
    }

    fn fetch_version(&self, lists: Lists, package: &str, version: &str) -> Result<PathBuf> {
        let key = format!("{package}_{}", plain(version, ".+~-"));
        self.cached("deb", &key, |dir| {
            self.unpack(lists, package, version, dir).or_else(|_| {
                // The mirror may have replaced the version since the lists were read.
                self.go_on()?;
                self.refresh_lists(lists, true)?;
                self.unpack(lists, package, version, dir)
            })
        })
    }

    fn unpack(&self, lists: Lists, package: &str, version: &str, dir: &Path) -> Result<()> {
        self.progress.show(&format!("fetching Debian package {package} {version}"));
        let download = tempfile::tempdir_in(dir).with_context(|| format!("cannot create a directory in {}", dir.display()))?;
        let name = format!("{package}={version}");
        self.run(self.apt(lists, "apt-get").args(["download", "-qq", &name]).current_dir(download.path()))?;
        let file = only_file(download.path(), |name| name.ends_with(".deb"))?;
        self.progress.show(&format!("unpacking {package}"));
        // It gives the top directory the mode that the package has for '/'.
        self.run(Command::new("dpkg").arg("-x").arg(file).arg(dir))
    }
}

/// The packages that `apt-cache depends` names.
fn depends(said: &str) -> impl Iterator<Item = &str> {
    said.lines().filter_map(|line| line.trim_start().strip_prefix("Depends: "))
}

/// The candidate that `apt-cache policy` names.
fn candidate(said: &str) -> Option<&str> {
    said.lines().find_map(|line| line.trim_start().strip_prefix("Candidate: ")).filter(|version| *version != "(none)")
}

/// The file of a directory whose name is like this.
pub(crate) fn only_file(dir: &Path, is_it: impl Fn(&str) -> bool) -> Result<PathBuf> {
    let entries = fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let found = entries.flatten().find(|entry| is_it(&entry.file_name().to_string_lossy())).map(|entry| entry.path());
    found.with_context(|| format!("{} has no such file", dir.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_apt_says_is_read() {
        let policy = "qemu:\n  Installed: (none)\n  Candidate: 1:10.0.3\n  Version table:\n";
        assert_eq!(candidate(policy), Some("1:10.0.3"));
        assert_eq!(candidate("x:\n  Candidate: (none)\n"), None);
        assert_eq!(candidate(""), None);
        let said = "linux-image-amd64\n  Depends: linux-image-6.1.0-41-amd64\n  Depends: other\n";
        assert_eq!(depends(said).collect::<Vec<_>>(), ["linux-image-6.1.0-41-amd64", "other"]);
    }
}

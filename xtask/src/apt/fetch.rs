// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Queries the package lists and fetches packages into the cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use super::{BACKPORTS, Lists, SUITE, UNSTABLE, plain};
use crate::tools::Tools;

impl Tools<'_> {
    /// Returns the first dependency of `package` whose name begins with `prefix` and continues with a text that `rest` accepts. For a meta
    /// package such as linux-image-amd64, this is the current kernel package.
    pub(crate) fn debian_depends(&self, package: &str, prefix: &str, rest: fn(&str) -> bool) -> Result<String> {
        self.answer(Lists::Stable, &format!("depends-{package}-{prefix}"), || {
            let said = self.output(self.apt(Lists::Stable, "apt-cache").args(["depends", "--important", package]))?;
            let found = depends(&said).find(|name| name.strip_prefix(prefix).is_some_and(rest));
            found
                .map(String::from)
                .with_context(|| format!("Debian package {package} has no dependency whose name begins with {prefix}"))
        })
    }

    /// Downloads the newest version of a Debian package from bookworm, its updates and its security archive. Unpacks the package into the
    /// cache without installing the package. Returns the directory of the unpacked package.
    pub(crate) fn fetch_deb(&self, package: &str) -> Result<PathBuf> {
        self.fetch_newest(Lists::Stable, package)
    }

    /// Does the same as [`Tools::fetch_deb`], for a package of the unstable suite.
    pub(crate) fn fetch_unstable(&self, package: &str) -> Result<PathBuf> {
        self.fetch_newest(Lists::Unstable, package)
    }

    fn fetch_newest(&self, lists: Lists, package: &str) -> Result<PathBuf> {
        let version = self.answer(lists, &format!("candidate-{package}"), || self.candidate(lists, package, None))?;
        self.fetch_version(lists, package, &version)
    }

    /// Does the same as [`Tools::fetch_deb`], for a package of the backports.
    pub(crate) fn fetch_backport(&self, package: &str) -> Result<PathBuf> {
        let name = format!("candidate-{package}-{BACKPORTS}");
        let version = self.answer(Lists::Stable, &name, || self.candidate(Lists::Stable, package, Some(BACKPORTS)))?;
        self.fetch_version(Lists::Stable, package, &version)
    }

    /// Returns the newest version of a source package in the backports.
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

    /// Downloads the upstream source of a Debian source package and unpacks it as `dir`, without Debian's changes. The signed package lists
    /// contain the checksum of the source.
    pub(crate) fn fetch_source(&self, package: &str, version: &str, dir: &Path) -> Result<()> {
        fs::create_dir(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let name = format!("{package}={version}");
        let mut fetch = self.apt(Lists::Stable, "apt-get");
        self.run(fetch.args(["source", "-qq", "--tar-only", "--download-only", &name]).current_dir(dir))?;
        let archive = only_file(dir, |name| name.contains(".orig.tar."))?;
        self.run(Command::new("tar").arg("-C").arg(dir).arg("-xf").arg(&archive).arg("--strip-components=1"))?;
        fs::remove_file(&archive).with_context(|| format!("cannot remove {}", archive.display()))
    }

    /// Returns the version that apt would install if it prefers `suite`. apt ignores backports unless their suite is named.
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
                // The mirror may have replaced the version since the package lists were downloaded. So refresh the lists and retry.
                self.go_on()?;
                self.refresh_lists(lists, true)?;
                self.unpack(lists, package, version, dir)
            })
        })
    }

    fn unpack(&self, lists: Lists, package: &str, version: &str, dir: &Path) -> Result<()> {
        self.progress.show(&format!("fetching Debian package {package} {version}"));
        let download =
            tempfile::tempdir_in(dir).with_context(|| format!("cannot create a directory in {}", dir.display()))?;
        let name = format!("{package}={version}");
        self.run(self.apt(lists, "apt-get").args(["download", "-qq", &name]).current_dir(download.path()))?;
        let file = only_file(download.path(), |name| name.ends_with(".deb"))?;
        self.progress.show(&format!("unpacking {package}"));
        // dpkg also changes the permissions of `dir` to the permissions that the package sets for `/`.
        self.run(Command::new("dpkg").arg("-x").arg(file).arg(dir))
    }
}

/// Returns the dependencies that the output of `apt-cache depends` lists.
fn depends(said: &str) -> impl Iterator<Item = &str> {
    said.lines().filter_map(|line| line.trim_start().strip_prefix("Depends: "))
}

/// Returns the candidate version from the output of `apt-cache policy`.
fn candidate(said: &str) -> Option<&str> {
    said.lines().find_map(|line| line.trim_start().strip_prefix("Candidate: ")).filter(|version| *version != "(none)")
}

/// Returns the first file in a directory whose name `is_it` accepts.
pub(crate) fn only_file(dir: &Path, is_it: impl Fn(&str) -> bool) -> Result<PathBuf> {
    let entries = fs::read_dir(dir).with_context(|| format!("cannot read {}", dir.display()))?;
    let found = entries.flatten().find(|entry| is_it(&entry.file_name().to_string_lossy())).map(|entry| entry.path());
    found.with_context(|| format!("found no file with the expected name in {}", dir.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn apt_output_is_parsed() {
        let policy = "qemu:\n  Installed: (none)\n  Candidate: 1:10.0.3\n  Version table:\n";
        assert_eq!(candidate(policy), Some("1:10.0.3"));
        assert_eq!(candidate("x:\n  Candidate: (none)\n"), None);
        assert_eq!(candidate(""), None);
        let said = "linux-image-amd64\n  Depends: linux-image-6.1.0-41-amd64\n  Depends: other\n";
        assert_eq!(depends(said).collect::<Vec<_>>(), ["linux-image-6.1.0-41-amd64", "other"]);
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `scripts/package`: builds the Debian package by debhelper with the rules in `debian/`, and checks it with lintian.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use clap::Args;

use crate::apt::only_file;
use crate::tools::Tools;

/// Options of `scripts/package`.
#[derive(Debug, Clone, Default, Args)]
pub struct Options {
    /// Directory for the package.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

impl Tools<'_> {
    /// Builds the package, checks it, and returns its file.
    ///
    /// # Errors
    /// Fails if the package cannot be built, if lintian finds errors or warnings, or on a signal.
    pub fn package(&self, options: &Options) -> Result<PathBuf> {
        self.need_packages("building and checking the Debian package", &["debhelper", "dpkg-dev", "lintian"])?;
        let target = self.target_dir()?;
        let out = options.out.clone().unwrap_or_else(|| target.join("package"));
        fs::create_dir_all(&out).with_context(|| format!("cannot create {}", out.display()))?;
        let out = fs::canonicalize(&out).with_context(|| out.display().to_string())?;
        // Build the programs here first, so that this slow step shows its progress.
        let programs = ["build", "--release", "--locked", "-p", "vmm", "-p", "carom-remote"];
        self.build("carom and carom-remote", &programs)?;
        self.progress.show("building the Debian package");
        let _lock = self.lock(&target.join(".lock-package"), "waiting for another build of the package")?;
        remove_packages(&out)?;
        let mut rules = Command::new("debian/rules");
        // Without `clean`, debhelper uses the files of an earlier build that did not pass the checks.
        rules.args(["clean", "binary"]).current_dir(&self.checkout);
        rules.env("CARGO_TARGET_DIR", &target).env("CAROM_PACKAGE_DIR", &out).env("DEB_BUILD_OPTIONS", "noautodbgsym");
        self.run_quietly(&mut rules, &out.join("log"))?;
        let package = only_file(&out, |name| name.ends_with(".deb"))?;
        self.progress.show("checking the Debian package");
        self.progress.end();
        let mut lintian = Command::new("lintian");
        lintian.args(["--allow-root", "--fail-on", "error,warning", "--tag-display-limit", "0"]).arg(&package);
        self.run(&mut lintian)?;
        Ok(package)
    }
}

/// Removes packages of earlier versions.
fn remove_packages(out: &Path) -> Result<()> {
    while let Ok(old) = only_file(out, |name| name.starts_with("carom_") && name.ends_with(".deb")) {
        fs::remove_file(&old).with_context(|| format!("cannot remove {}", old.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn package_has_the_version_of_the_workspace() {
        let read = |name: &str| fs::read_to_string(crate::checkout().join(name)).unwrap();
        let (manifest, changelog) = (read("Cargo.toml"), read("debian/changelog"));
        let version = manifest.lines().find_map(|line| line.strip_prefix("version = \"")?.strip_suffix('"')).unwrap();
        assert!(changelog.starts_with(&format!("carom ({version}-")), "{version}: {changelog}");
    }

    #[test]
    fn documents_show_the_packages_own_unit_user_and_limits() {
        let read = |name: &str| fs::read_to_string(crate::checkout().join(name)).unwrap();
        let document = read("docs/unprivileged.md");
        for name in ["carom@.service", "carom.sysusers", "limits.conf"] {
            let file = read(&format!("debian/{name}"));
            // Skip the licence line.
            let (_, text) = file.split_once('\n').unwrap();
            let text = text.strip_prefix("#\n").unwrap_or(text);
            assert!(document.contains(&format!("\n{text}```\n")), "docs/unprivileged.md shows another {name}");
        }
    }

    #[test]
    fn packages_of_other_versions_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["carom_0.1_amd64.deb", "carom_0.2_amd64.deb", "log"] {
            fs::write(dir.path().join(name), "").unwrap();
        }
        remove_packages(dir.path()).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Debian packages and programs of this machine. Missing packages are named, then installed.

use std::env;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use rustix::process::geteuid;

use crate::tools::Tools;

impl Tools<'_> {
    /// Installs each package of `packages` that is missing. First prints a message with the reason `why`.
    pub(crate) fn need_packages(&self, why: &str, packages: &[&str]) -> Result<()> {
        ensure!(
            program("dpkg-query").is_some(),
            "dpkg-query not found: this is not a Debian system; install the equivalents of these packages by hand: {}",
            packages.join(" ")
        );
        let missing: Vec<&str> = packages.iter().copied().filter(|package| !is_installed(package)).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let names = missing.join(" ");
        self.progress.say(&format!("installing Debian packages ({why}): {names}"));
        let install = || -> Result<Command> {
            let mut command = as_root("env")?;
            command.args(["DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-y", "--no-install-recommends"]);
            // Another apt may be running, for example on a machine that has just booted.
            command.args(["-o", "DPkg::Lock::Timeout=300"]);
            command.args(&missing);
            Ok(command)
        };
        // The package lists may be absent (container images) or too old; refresh them only when needed.
        if self.succeeds(&mut install()?) {
            return Ok(());
        }
        let dir = tempfile::tempdir().context("cannot create a temporary directory for a log")?;
        let log = dir.path().join("log");
        let mut update = as_root("apt-get")?;
        self.run_quietly(update.arg("update"), &log)
            .and_then(|()| self.run_quietly(&mut install()?, &log))
            .with_context(|| format!("cannot install the packages {names}; install them by hand"))
    }

    /// Returns the path of `command`. If the command is not found, installs `package` first.
    pub(crate) fn need_command(&self, command: &str, package: &str, why: &str) -> Result<PathBuf> {
        if let Some(found) = program(command) {
            return Ok(found);
        }
        self.need_packages(why, &[package])?;
        program(command).with_context(|| format!("the package {package} does not contain {command}"))
    }
}

/// Finds a program in the directories of `PATH`, in /usr/sbin and in /sbin.
pub(crate) fn program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let directories: Vec<PathBuf> = env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]).collect();
    directories.into_iter().map(|directory| directory.join(name)).find(|file| is_executable(file))
}

fn is_executable(file: &Path) -> bool {
    file.is_file() && rustix::fs::access(file, rustix::fs::Access::EXEC_OK).is_ok()
}

fn is_installed(package: &str) -> bool {
    let output = Command::new("dpkg-query")
        .args(["-W", "-f", "${db:Status-Status}", package])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output();
    output.is_ok_and(|output| output.stdout == b"installed")
}

/// Returns a command that runs as root, by sudo if necessary.
pub(crate) fn as_root(program_name: &str) -> Result<Command> {
    if geteuid().is_root() {
        return Ok(Command::new(program_name));
    }
    ensure!(program("sudo").is_some(), "{program_name} needs root: run this program as root, or install sudo");
    let mut command = Command::new("sudo");
    command.arg(program_name);
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_in_the_directories_of_the_path_only() {
        assert!(program("sh").is_some_and(|file| file.is_absolute()));
        assert_eq!(program("no-such-program-of-anyone"), None);
        assert_eq!(program("etc"), None);
    }
}

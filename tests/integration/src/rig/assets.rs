// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Kernel, initramfs and emulator of the machine, which `scripts/lib/rig-assets` fetches and builds where they are missing.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context, Result, bail, ensure};

use super::options::Kernel;
use super::tree;
use crate::signals::Signals;

/// What the machine starts from.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Boot {
    pub(super) kernel: PathBuf,
    pub(super) initramfs: PathBuf,
    /// Parameters that this kernel needs besides.
    pub(super) parameters: String,
}

/// The machine's kernel and initramfs.
///
/// # Errors
/// They cannot be had, which the script has said why, or a signal came.
pub(super) fn boot(checkout: &Path, kernel: Kernel, signals: &Signals) -> Result<Boot> {
    let name = match kernel {
        Kernel::Debian => "debian",
        Kernel::Iommufd => "iommufd",
    };
    parse_boot(&ask(checkout, &["boot", name], signals)?).context("scripts/lib/rig-assets boot")
}

fn parse_boot(answer: &str) -> Result<Boot> {
    let [kernel, initramfs, parameters] = answer.lines().collect::<Vec<_>>()[..] else {
        bail!("three lines were expected, not {answer:?}");
    };
    Ok(Boot { kernel: kernel.into(), initramfs: initramfs.into(), parameters: parameters.into() })
}

/// The program that emulates the machine, with its first arguments.
///
/// # Errors
/// As [`boot`].
pub(super) fn emulator(checkout: &Path, signals: &Signals) -> Result<Vec<String>> {
    let words: Vec<String> = ask(checkout, &["emulator"], signals)?.lines().map(String::from).collect();
    ensure!(!words.is_empty(), "scripts/lib/rig-assets emulator: no answer");
    Ok(words)
}

/// What the script prints. Its messages and progress go to stderr.
fn ask(checkout: &Path, arguments: &[&str], signals: &Signals) -> Result<String> {
    let script = checkout.join("scripts/lib/rig-assets");
    let mut child = Command::new(&script)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("starting {}", script.display()))?;
    let mut stdout = child.stdout.take().context("the script's output")?;
    let reader = thread::spawn(move || {
        let mut answer = String::new();
        stdout.read_to_string(&mut answer).map(|_| answer)
    });
    let Some(status) = tree::run_command(&mut child, signals)? else { bail!("interrupted") };
    ensure!(status.success(), "what the emulated machine needs could not be made");
    let answer = reader.join().ok().context("reading what rig-assets says")?;
    answer.context("reading what rig-assets says")
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// What the rig makes of a script with this body.
    fn asked(body: &str) -> Result<Boot> {
        let dir = tempfile::tempdir().unwrap();
        let lib = dir.path().join("a clone/scripts/lib");
        fs::create_dir_all(&lib).unwrap();
        fs::write(lib.join("rig-assets"), format!("#!/bin/sh\n{body}\n")).unwrap();
        fs::set_permissions(lib.join("rig-assets"), fs::Permissions::from_mode(0o755)).unwrap();
        boot(&dir.path().join("a clone"), Kernel::Debian, &Signals::default())
    }

    #[test]
    fn answer_is_three_lines_of_which_the_last_may_be_empty() {
        let boot = asked(r#"echo "/a b/kernel"; echo /initramfs; echo "$1 $2""#).unwrap();
        assert_eq!((boot.kernel.to_str(), boot.parameters.as_str()), (Some("/a b/kernel"), "boot debian"));
        assert_eq!(asked("printf '/kernel\\n/initramfs\\n\\n'").unwrap().parameters, "");
        assert!(asked("echo /kernel").is_err());
    }

    #[test]
    fn script_that_fails_is_an_error() {
        assert!(asked("echo /kernel; echo /initramfs; echo; exit 1").is_err());
    }
}

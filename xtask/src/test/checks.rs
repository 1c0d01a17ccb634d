// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Stages without guests.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::kernel::GuestKernel;
use crate::key::files_below;
use crate::mails::changed_files;
use crate::tools::Tools;

/// Version of cargo-deny. The version is fixed, because new checks of a newer version must not fail old commits.
const DENY_VERSION: &str = "0.20.2";

impl Tools<'_> {
    pub(super) fn test_format(&self) -> Result<()> {
        self.run_shown(self.cargo().args(["fmt", "--all", "--check"]))
    }

    pub(super) fn test_lints(&self) -> Result<()> {
        let features = "carom-integration/rig,devices/rig";
        let mut clippy = self.cargo();
        clippy.args([
            "clippy",
            "--workspace",
            "--all-targets",
            "--locked",
            "--features",
            features,
            "--",
            "-D",
            "warnings",
        ]);
        self.run_shown(&mut clippy)?;
        self.run_shown(self.cargo().args(["run", "--quiet", "--locked", "-p", "carom-structure"]))
    }

    /// Checks the dependencies without the advisory database. The database changes daily, so the result for one commit would
    /// change, too.
    pub(super) fn test_dependencies(&self) -> Result<()> {
        let dir = self.cached("cargo-deny", DENY_VERSION, |dir| {
            self.progress.show(&format!("building cargo-deny {DENY_VERSION} (once, some minutes)"));
            let mut install = self.cargo();
            install.args(["install", "--quiet", "--locked", "--no-default-features", "--root"]).arg(dir);
            install.arg(format!("cargo-deny@{DENY_VERSION}")).env("CARGO_TARGET_DIR", dir.join("target"));
            self.run(&mut install)?;
            fs::remove_dir_all(dir.join("target")).context("cannot remove the build directory of cargo-deny")
        })?;
        let mut deny = Command::new(dir.join("bin/cargo-deny"));
        deny.args(["--workspace", "check", "--hide-inclusion-graph", "bans", "licenses", "sources"]);
        self.run_shown(deny.current_dir(&self.checkout))
    }

    pub(super) fn test_scripts(&self) -> Result<()> {
        let shellcheck = self.need_command("shellcheck", "shellcheck", "checking scripts")?;
        let files = self.output(Command::new("git").arg("ls-files").current_dir(&self.checkout))?;
        let (mut bash, mut dash) = (Vec::new(), Vec::new());
        for file in files.lines() {
            let text = fs::read(self.checkout.join(file)).unwrap_or_default();
            match language(file, &text) {
                Some(Language::Bash) => bash.push(file),
                Some(Language::Dash) => dash.push(file),
                None => {}
            }
        }
        self.run_shown(Command::new(&shellcheck).args(&bash).current_dir(&self.checkout))?;
        self.run_shown(Command::new(&shellcheck).arg("--shell=dash").args(&dash).current_dir(&self.checkout))?;
        self.print(&format!("{} scripts are fine\n", bash.len() + dash.len()));
        Ok(())
    }

    /// Runs the kernel's `checkpatch.pl` on `guest/`.
    ///
    /// Some checks do not apply and are left out:
    /// - `guest/` is not a kernel tree, so it has no maintainers' entries, and commits cannot be looked up.
    /// - Each endpoint copies its DMA operations, so the operations cannot be constant.
    /// - Definitions of trace events have their own format, which checkpatch.pl reports as bad style.
    pub(super) fn test_patches(&self) -> Result<()> {
        self.need_command("perl", "perl", "running checkpatch.pl")?;
        let tree = self.kernel_source(&GuestKernel { stock: true, ..GuestKernel::default() })?;
        let checkpatch = || {
            let mut perl = Command::new("perl");
            perl.arg(tree.join("scripts/checkpatch.pl")).args(["--no-tree", "--strict", "--quiet", "--terse"]);
            perl.args(["--ignore", "FILE_PATH_CHANGES,UNKNOWN_COMMIT_ID,CONST_STRUCT", "--max-line-length=100"]);
            perl.current_dir(&self.checkout);
            perl
        };
        self.run_shown(checkpatch().arg("--file").args(self.sources()?))?;
        let mut failed = 0;
        for patch in self.patches()? {
            self.print(&format!("{}:\n", patch.strip_prefix(&self.checkout).unwrap_or(&patch).display()));
            // Use standard input: checkpatch.pl treats a file that git tracks as source, not as a patch.
            let file = File::open(&patch).with_context(|| format!("cannot open {}", patch.display()))?;
            failed += usize::from(self.run_shown_with(checkpatch().arg("-"), file).is_err());
            self.go_on()?;
        }
        match failed {
            0 => Ok(()),
            failed => bail!("checkpatch.pl complains about {failed} patches"),
        }
    }

    /// Returns the C files of the guest patch and of the modules, relative to the checkout.
    fn sources(&self) -> Result<Vec<PathBuf>> {
        let is_source = |file: &Path| {
            file.extension().is_some_and(|kind| kind == "c" || kind == "h")
                && !file.components().any(|part| part.as_os_str() == "trace")
        };
        let mut sources = Vec::new();
        for top in ["guest/src", "guest/bench"].map(Path::new) {
            let files = files_below(&self.checkout.join(top))?.into_iter().map(|(file, _)| file);
            sources.extend(files.filter(|file| is_source(file)).map(|file| top.join(file)));
        }
        sources.sort();
        Ok(sources)
    }

    fn patches(&self) -> Result<Vec<PathBuf>> {
        let top = self.checkout.join("guest/patches");
        let files = files_below(&top)?.into_iter().map(|(file, _)| top.join(file));
        let mut patches = Vec::new();
        for file in files.filter(|file| file.extension().is_some_and(|kind| kind == "patch")) {
            let text = fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
            // If a patch only adds files of guest/src, its file has no diff, only the text of the mail, and needs no check.
            if changed_files(&text).next().is_some() {
                patches.push(file);
            }
        }
        patches.sort();
        Ok(patches)
    }

    pub(super) fn test_allocator(&self) -> Result<()> {
        let run = self.checkout.join("guest/tests/allocator/run");
        self.run_shown(Command::new(run).args(["--seconds", "30"]))
    }

    pub(super) fn test_unit(&self) -> Result<()> {
        self.run_shown(self.cargo().args(["test", "--workspace", "--locked"]))
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Language {
    Bash,
    Dash,
}

/// Returns the language of a script by its first lines or its name, or `None` if the file is not a script.
fn language(file: &str, text: &[u8]) -> Option<Language> {
    let text = String::from_utf8_lossy(text);
    let mut head = text.lines();
    let (first, second) = (head.next().unwrap_or_default(), head.next().unwrap_or_default());
    let shebangs = ["#!/usr/bin/env bash", "#!/bin/bash", "#!/bin/sh"];
    if first.starts_with("#!/bin/busybox sh") {
        Some(Language::Dash)
    } else if shebangs.iter().any(|shebang| first.starts_with(shebang))
        || [first, second].iter().any(|line| line.contains("# shellcheck shell="))
        || file.ends_with(".sh")
    {
        Some(Language::Bash)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_scripts_have_a_shell_language() {
        assert_eq!(language("a", b"#!/usr/bin/env bash\nset -e\n"), Some(Language::Bash));
        assert_eq!(language("a", b"# SPDX\n# shellcheck shell=bash\n"), Some(Language::Bash));
        assert_eq!(language("a.sh", b""), Some(Language::Bash));
        assert_eq!(language("init", b"#!/bin/busybox sh\n# shellcheck shell=dash\n"), Some(Language::Dash));
        assert_eq!(language("a.rs", b"// #!/bin/sh\n"), None);
        assert_eq!(language("a.png", b"\x89PNG\xff\n"), None);
    }
}

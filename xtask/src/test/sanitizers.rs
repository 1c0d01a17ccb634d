// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Stage with tools that find bugs which tests alone do not notice.
//!
//! Miri interprets tests of crates that do not use the host, and detects all undefined behaviour in these tests. For tests that use the
//! host, `cargo careful` builds the tests with AddressSanitizer, and with a standard library that checks unsafe preconditions.
//!
//! Both tools need a nightly compiler. If no nightly compiler is available, the stage prints what was not tested, and passes.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result};

use crate::packages::program;
use crate::tools::Tools;

/// Version of the nightly compiler, defined only here. The version is fixed, because a newer one may have new checks or new bugs.
const NIGHTLY: &str = "nightly-2026-05-20";
const CAREFUL_VERSION: &str = "0.4.10";

/// Crates whose tests Miri can run.
const UNDER_MIRI: [&str; 4] = ["-p", "iommu_bounce", "-p", "carom-api"];

/// Modules of carom-api whose tests take Miri longer than all others together. Tests of these modules build the whole command line or
/// document, or fill each slot of each bus.
const SLOW_UNDER_MIRI: [&str; 4] = ["cli::", "document::", "object::", "vm_config::"];

/// Crates with unsafe code. AddressSanitizer checks their unit tests, and the test program with a malicious guest.
const UNDER_ASAN: [&str; 4] = ["-p", "devices", "-p", "vmm"];

/// An available nightly compiler.
struct Nightly {
    rustup: PathBuf,
    /// rustup's directory of the compiler. `None` for the user's own directory.
    home: Option<PathBuf>,
}

impl Tools<'_> {
    pub(super) fn test_sanitizers(&self) -> Result<()> {
        let Some(nightly) = self.nightly()? else {
            self.print(&format!(
                "not tested with Miri and AddressSanitizer: {NIGHTLY} with miri and rust-src is not available from rustup\n"
            ));
            return Ok(());
        };
        self.test_with_miri(&nightly)?;
        self.test_with_asan(&nightly)
    }

    fn test_with_miri(&self, nightly: &Nightly) -> Result<()> {
        self.print("-- with Miri\n");
        let miri = ["cargo", "miri"];
        if !self.set_up(nightly, &miri, &[])? {
            self.print("not tested with Miri: its standard library cannot be built\n");
            return Ok(());
        }
        let mut test = self.nightly_command(nightly, &miri)?;
        test.args(["test", "--locked", "--lib"]).args(UNDER_MIRI);
        test.arg("--").args(SLOW_UNDER_MIRI.iter().flat_map(|name| ["--skip", name]));
        // Turn off Miri's isolation, because tests read the host's clock.
        test.env("MIRIFLAGS", "-Zmiri-disable-isolation");
        // Miri is a thousand times slower, so property tests use few values.
        self.run_shown(test.env("PROPTEST_CASES", "2"))
    }

    fn test_with_asan(&self, nightly: &Nightly) -> Result<()> {
        self.print("-- with AddressSanitizer\n");
        let program = match self.careful() {
            Ok(program) => program.display().to_string(),
            Err(error) => {
                self.go_on()?;
                self.print(&format!("not tested with AddressSanitizer: cargo-careful: {error:#}\n"));
                return Ok(());
            }
        };
        let (careful, sanitizer) = ([program.as_str(), "careful"], "-Zcareful-sanitizer=address");
        if !self.set_up(nightly, &careful, &[sanitizer])? {
            self.print("not tested with AddressSanitizer: the standard library cannot be built with it\n");
            return Ok(());
        }
        let test = || {
            let mut test = self.nightly_command(nightly, &careful)?;
            test.args(["test", sanitizer, "--locked"]).args(UNDER_ASAN);
            // Without this option, leaks are not detected.
            test.env("ASAN_OPTIONS", "detect_leaks=1");
            anyhow::Ok(test)
        };
        self.run_shown(test()?.arg("--lib"))?;
        let mut hostile = test()?;
        hostile.args(["--test", "hostile_guest", "--", "--nocapture"]);
        self.run_shown(hostile.envs([("CAROM_HOSTILE_SECONDS", "60"), ("CAROM_HOSTILE_SEEDS", "1")]))
    }

    /// Builds the standard library for a tool, with sources from crates.io. Returns true on success.
    fn set_up(&self, nightly: &Nightly, tool: &[&str], options: &[&str]) -> Result<bool> {
        self.progress.show(&format!("building a standard library for {} (once, some minutes)", tool[1]));
        let dir = tempfile::tempdir().context("cannot create a temporary directory for a log")?;
        let mut command = self.nightly_command(nightly, tool)?;
        let done = self.run_quietly(command.arg("setup").args(options), &dir.path().join("log")).is_ok();
        self.go_on()?;
        Ok(done)
    }

    /// Returns a command that runs `words` with the nightly compiler. The command uses its own build directories.
    fn nightly_command(&self, nightly: &Nightly, words: &[&str]) -> Result<Command> {
        let mut command = nightly.rustup();
        command.args(["run", NIGHTLY]).args(words).current_dir(&self.checkout);
        command.env("CARGO_TARGET_DIR", self.target_dir()?.join("sanitizers")).env("CARGO_INCREMENTAL", "0");
        // `cargo miri` and `cargo careful` store the standard libraries that they build in this directory.
        command.env("XDG_CACHE_HOME", self.cache.join("sanitizers"));
        // These variables name the compiler that built this program, so the command must not inherit the variables.
        for variable in ["CARGO", "RUSTC", "RUSTDOC", "RUSTUP_TOOLCHAIN"] {
            command.env_remove(variable);
        }
        Ok(command)
    }

    /// Returns the user's compiler, or a compiler in the cache, which is fetched if it is missing. Returns `None` if no compiler can be
    /// fetched.
    fn nightly(&self) -> Result<Option<Nightly>> {
        let Some(rustup) = program("rustup") else { return Ok(None) };
        let own = Nightly { rustup: rustup.clone(), home: None };
        if self.is_whole(&own) {
            return Ok(Some(own));
        }
        let cached = Nightly { rustup, home: Some(self.cache.join("rustup")) };
        if !self.is_whole(&cached) {
            self.progress.show(&format!("fetching {NIGHTLY} (once)"));
            let mut install = cached.rustup();
            install.args(["toolchain", "install", NIGHTLY, "--profile", "minimal", "--no-self-update"]);
            // Ignore the exit status: the code below checks that the components are installed.
            let _ = self.succeeds(install.args(["-c", "miri", "-c", "rust-src"]));
            self.go_on()?;
        }
        Ok(self.is_whole(&cached).then_some(cached))
    }

    fn is_whole(&self, nightly: &Nightly) -> bool {
        let mut list = nightly.rustup();
        let list = list.args(["component", "list", "--installed", "--toolchain", NIGHTLY]);
        list.output().is_ok_and(|said| has_components(&String::from_utf8_lossy(&said.stdout)))
    }

    fn careful(&self) -> Result<PathBuf> {
        let dir = self.cached("cargo-careful", CAREFUL_VERSION, |dir| {
            self.progress.show(&format!("building cargo-careful {CAREFUL_VERSION} (once)"));
            let mut install = self.cargo();
            install.args(["install", "--quiet", "--locked", "--root"]).arg(dir);
            install.arg(format!("cargo-careful@{CAREFUL_VERSION}")).env("CARGO_TARGET_DIR", dir.join("target"));
            self.run(&mut install)?;
            fs::remove_dir_all(dir.join("target")).context("cannot remove the build directory of cargo-careful")
        })?;
        Ok(dir.join("bin/cargo-careful"))
    }
}

impl Nightly {
    fn rustup(&self) -> Command {
        let mut command = Command::new(&self.rustup);
        // Listing a compiler's components must not install the compiler.
        command.env("RUSTUP_AUTO_INSTALL", "0");
        if let Some(home) = &self.home {
            command.env("RUSTUP_HOME", home);
        }
        command
    }
}

/// True if rustup's list of installed components contains the components that both tools need.
fn has_components(list: &str) -> bool {
    let has = |name: &str| list.lines().any(|line| line == name || line.starts_with(&format!("{name}-")));
    has("miri") && has("rust-src")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compiler_without_all_components_is_not_whole() {
        assert!(has_components("cargo-x86_64-unknown-linux-gnu\nmiri-x86_64-unknown-linux-gnu\nrust-src\n"));
        assert!(!has_components("cargo-x86_64-unknown-linux-gnu\nrust-src\n"));
        assert!(!has_components("miri-x86_64-unknown-linux-gnu\nrust-std-x86_64-unknown-linux-gnu\n"));
        assert!(!has_components(""));
    }
}

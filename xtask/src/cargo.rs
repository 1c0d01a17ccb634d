// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Builds programs of the workspace.
//!
//! Cargo unifies the features of all packages that one command builds. A crate is rebuilt if another command needs other features. To avoid
//! such rebuilds, unoptimized programs are always built as part of the whole workspace.

use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::tools::Tools;

/// Arguments of cargo that build the whole workspace. Further options, such as `--bin NAME`, select the programs and tests to build.
pub(crate) const WORKSPACE: [&str; 5] =
    ["build", "--locked", "--workspace", "--features", "carom-integration/rig,devices/rig"];

/// Test executable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TestProgram {
    /// Name of the test target.
    pub(crate) name: String,
    /// Directory of the package. cargo runs the package's tests in this directory.
    pub(crate) directory: PathBuf,
    pub(crate) executable: PathBuf,
}

impl Tools<'_> {
    /// Returns a cargo command that runs at the top of the checkout.
    pub(crate) fn cargo(&self) -> Command {
        let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo")));
        cargo.current_dir(&self.checkout);
        cargo
    }

    /// Runs cargo with these arguments, and shows how many crates cargo has started to compile. If cargo fails, shows its output.
    pub(crate) fn build(&self, what: &str, arguments: &[&str]) -> Result<()> {
        self.progress.show(&format!("building {what}"));
        let dir = tempfile::tempdir().context("cannot create a temporary directory for a log")?;
        let mut count = 0;
        self.run_watched(self.cargo().args(arguments), &dir.path().join("log"), |line| {
            if let Some(name) = compiled_crate(line) {
                count += 1;
                self.progress.show(&format!("building {what}: crate {count}, {name}"));
            }
        })?;
        self.progress.end();
        Ok(())
    }

    /// Builds the tests that `selection` names.
    pub(crate) fn build_tests(&self, what: &str, selection: &[&str]) -> Result<Vec<TestProgram>> {
        self.progress.show(&format!("building {what}"));
        self.progress.end();
        let mut cargo = self.cargo();
        cargo.args(WORKSPACE).args(["--message-format", "json-render-diagnostics"]).args(selection);
        Ok(test_programs(&self.output(&mut cargo)?))
    }

    /// Builds a benchmark of a package and returns its executable.
    pub(crate) fn benchmark(&self, package: &str, name: &str) -> Result<PathBuf> {
        self.progress.show(&format!("building the benchmark {name}"));
        self.progress.end();
        let mut cargo = self.cargo();
        cargo.args(["bench", "--no-run", "--locked", "-p", package, "--bench", name]);
        let messages = self.output(cargo.args(["--message-format", "json-render-diagnostics"]))?;
        let file = artifacts(&messages).find_map(|artifact| executable(&artifact, "bench"));
        file.with_context(|| format!("cargo did not report the executable of the benchmark {name}"))
    }

    /// Returns cargo's target directory.
    pub(crate) fn target_dir(&self) -> Result<PathBuf> {
        let said = self.output(self.cargo().args(["metadata", "--format-version", "1", "--no-deps", "--locked"]))?;
        target_dir(&said).context("the output of cargo metadata names no target directory")
    }
}

/// Returns the name of the crate from cargo's message `Compiling NAME VERSION`.
fn compiled_crate(line: &str) -> Option<&str> {
    line.trim_start().strip_prefix("Compiling ")?.split(' ').next()
}

/// Returns the test executables that cargo's messages name (the Cargo Book, External Tools, JSON messages).
fn test_programs(messages: &str) -> Vec<TestProgram> {
    artifacts(messages).filter_map(|artifact| test_program(&artifact)).collect()
}

/// Returns the artifacts in cargo's messages.
fn artifacts(messages: &str) -> impl Iterator<Item = Value> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    messages.filter(|message| message["reason"] == "compiler-artifact")
}

/// Returns the executable of an artifact if its target is of this kind.
fn executable(artifact: &Value, kind: &str) -> Option<PathBuf> {
    let is_kind = artifact["target"]["kind"].as_array()?.iter().any(|known| known == kind);
    artifact["executable"].as_str().filter(|_| is_kind).map(PathBuf::from)
}

fn test_program(artifact: &Value) -> Option<TestProgram> {
    let executable = executable(artifact, "test")?;
    let manifest = Path::new(artifact["manifest_path"].as_str()?);
    let name = artifact["target"]["name"].as_str()?.to_owned();
    Some(TestProgram { name, directory: manifest.parent()?.to_path_buf(), executable })
}

fn target_dir(said: &str) -> Option<PathBuf> {
    serde_json::from_str::<Value>(said).ok()?["target_directory"].as_str().map(PathBuf::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_found_and_programs_of_the_same_name_are_not() {
        let artifact = |kind: &str, name: &str, executable: &str| {
            serde_json::json!({"reason": "compiler-artifact", "manifest_path": "/a b/p/Cargo.toml",
                "target": {"kind": [kind], "name": name}, "executable": executable})
            .to_string()
        };
        let messages = [
            artifact("bin", "guest", "/a b/target/debug/guest"),
            "no JSON".into(),
            artifact("test", "guest", "/a b/target/debug/deps/guest-1"),
        ];
        let expected = TestProgram {
            name: "guest".into(),
            directory: "/a b/p".into(),
            executable: "/a b/target/debug/deps/guest-1".into(),
        };
        assert_eq!(test_programs(&messages.join("\n")), [expected]);
    }

    #[test]
    fn compiled_crates_are_counted_and_other_messages_are_not() {
        assert_eq!(compiled_crate("   Compiling libc v0.2.1"), Some("libc"));
        assert_eq!(compiled_crate("   Compiling carom v0.1.0 (/a b/vmm)"), Some("carom"));
        assert_eq!(compiled_crate("    Finished `dev` profile in 2s"), None);
        assert_eq!(compiled_crate("warning: Compiling is slow"), None);
    }

    #[test]
    fn target_directory_is_read_whatever_its_name() {
        assert_eq!(
            target_dir(r#"{"packages": [], "target_directory": "/a \"b\"/target"}"#),
            Some("/a \"b\"/target".into())
        );
        assert_eq!(target_dir("{}"), None);
    }
}

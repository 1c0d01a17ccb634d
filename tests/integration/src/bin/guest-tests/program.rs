// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Programs of tests, built by cargo.

use std::env;
use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;

use anyhow::{Context, Result, bail, ensure};
use carom_integration::rig::{checkout, run_command};
use carom_integration::signals::Signals;
use serde_json::Value;

/// An executable file with tests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Program {
    /// Name of the test target.
    pub(crate) name: String,
    pub(crate) executable: PathBuf,
    /// Directory of the package, in which cargo would run it.
    pub(crate) directory: PathBuf,
}

impl Program {
    /// Builds the test target `name` of a package, with its feature `rig`.
    pub(crate) fn build(package: &str, name: &str, signals: &Signals) -> Result<Self> {
        let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo")));
        command
            .args(["test", "--locked", "--no-run", "--message-format", "json-render-diagnostics"])
            .args(["--package", package, "--features", "rig", "--test", name])
            .current_dir(checkout())
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let mut child = command.spawn().context("starting cargo")?;
        let mut stdout = child.stdout.take().context("cargo's output")?;
        let reader = thread::spawn(move || {
            let mut text = String::new();
            stdout.read_to_string(&mut text).map(|_| text)
        });
        let Some(status) = run_command(&mut child, signals)? else { bail!("interrupted") };
        ensure!(status.success(), "the tests {name} of {package} do not build");
        let text = reader.join().ok().context("reading cargo's messages")?.context("reading cargo's messages")?;
        Self::find(&text, name).with_context(|| format!("cargo names no executable of the tests {name}"))
    }

    /// Finds the program in cargo's messages (the Cargo Book, External Tools, JSON messages).
    fn find(messages: &str, name: &str) -> Option<Self> {
        let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        messages.filter(|message| message["reason"] == "compiler-artifact").find_map(|message| {
            let target = &message["target"];
            let is_test = target["kind"].as_array()?.iter().any(|kind| kind == "test");
            let manifest = Path::new(message["manifest_path"].as_str()?);
            let executable = message["executable"].as_str()?;
            (is_test && target["name"] == name).then(|| Self {
                name: name.into(),
                executable: executable.into(),
                directory: manifest.parent().unwrap_or(Path::new("/")).into(),
            })
        })
    }

    /// Whether there is a test whose name contains this.
    pub(crate) fn has_test(&self, filter: &str) -> Result<bool> {
        let output = Command::new(&self.executable).args(["--list", filter]).stdin(Stdio::null()).output();
        let output = output.with_context(|| format!("starting {}", self.executable.display()))?;
        ensure!(output.status.success(), "{} --list: {}", self.name, String::from_utf8_lossy(&output.stderr));
        Ok(String::from_utf8_lossy(&output.stdout).lines().any(|line| line.ends_with(": test")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executable_is_that_of_the_test_target_and_not_of_a_program_of_the_same_name() {
        let artifact = |kind: &str, name: &str, executable: &str| {
            serde_json::json!({"reason": "compiler-artifact", "manifest_path": "/a b/p/Cargo.toml",
                "target": {"kind": [kind], "name": name}, "executable": executable})
            .to_string()
        };
        let messages = [
            artifact("bin", "guest", "/a b/target/debug/guest"),
            "no JSON".into(),
            artifact("test", "debug", "/a b/target/debug/deps/debug-1"),
            artifact("test", "guest", "/a b/target/debug/deps/guest-1"),
        ];

        let program = Program::find(&messages.join("\n"), "guest").unwrap();

        assert_eq!(program.executable, Path::new("/a b/target/debug/deps/guest-1"));
        assert_eq!(program.directory, Path::new("/a b/p"));
        assert_eq!(Program::find(&messages.join("\n"), "other"), None);
    }
}

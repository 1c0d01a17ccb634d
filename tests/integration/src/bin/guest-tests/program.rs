// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Test programs that `scripts/test` has built.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

/// Test executable.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Program {
    /// Name of the test target.
    pub(crate) name: String,
    /// Directory of the package. The tests run in this directory, as cargo would run them.
    pub(crate) directory: PathBuf,
    pub(crate) executable: PathBuf,
}

impl Program {
    /// Finds the program `name` in a list that has three words for each program: the name, the directory and the executable.
    pub(crate) fn find(words: &[PathBuf], name: &str) -> Result<Self> {
        let found = words.chunks_exact(3).find(|program| program[0].as_os_str() == name);
        let program = found.with_context(|| format!("no option --program names the test program '{name}'"))?;
        Ok(Self { name: name.into(), directory: program[1].clone(), executable: program[2].clone() })
    }

    /// True if the program has a test whose name contains `filter`.
    pub(crate) fn has_test(&self, filter: &str) -> Result<bool> {
        let output = Command::new(&self.executable).args(["--list", filter]).stdin(Stdio::null()).output();
        let output = output.with_context(|| format!("cannot start {}", self.executable.display()))?;
        ensure!(
            output.status.success(),
            "cannot list the tests of {}: {}",
            self.name,
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8_lossy(&output.stdout).lines().any(|line| line.ends_with(": test")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_is_found_by_its_name() {
        let words = ["guest", "/a b/p", "/a b/guest-1", "debug", "/a b/p", "/a b/debug-1"].map(PathBuf::from);
        assert_eq!(Program::find(&words, "debug").unwrap().executable, PathBuf::from("/a b/debug-1"));
        assert!(Program::find(&words, "other").is_err());
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Crates of the workspace, as reported by cargo.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

#[derive(Deserialize)]
struct Metadata {
    workspace_root: PathBuf,
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    targets: Vec<Target>,
}

#[derive(Deserialize)]
struct Target {
    src_path: PathBuf,
}

/// Returns the workspace's folder, and the root file of each library, program, test and benchmark in it.
pub(crate) fn targets(directory: &Path) -> Result<(PathBuf, Vec<PathBuf>)> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(directory)
        .output()
        .context("cannot start cargo metadata")?;
    if !output.status.success() {
        bail!("cargo metadata failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let metadata: Metadata =
        serde_json::from_slice(&output.stdout).context("cannot parse the output of cargo metadata")?;
    let targets = metadata.packages.into_iter().flat_map(|package| package.targets);
    Ok((metadata.workspace_root, targets.map(|target| target.src_path).collect()))
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Text files. Errors contain the file's name.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result};

/// Reads a text file.
///
/// # Errors
/// Fails if the file cannot be read.
pub(crate) fn read(file: &Path) -> Result<String> {
    fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))
}

/// Writes a file.
///
/// # Errors
/// Fails if the file cannot be written.
pub(crate) fn write(file: &Path, text: &str) -> Result<()> {
    fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
}

/// Copies a file and creates its parent directories. The copy has mode 0644.
///
/// # Errors
/// Fails if the file cannot be copied.
pub(crate) fn copy(source: &Path, target: &Path) -> Result<()> {
    let parent = target.parent().unwrap_or(target);
    fs::create_dir_all(parent)
        .and_then(|()| fs::copy(source, target))
        .and_then(|_| fs::set_permissions(target, Permissions::from_mode(0o644)))
        .with_context(|| format!("cannot copy {}", source.display()))
}

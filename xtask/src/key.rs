// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Keys of cache entries. A key changes when any input changes.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

/// Collects the inputs of a key. The order of the inputs matters.
#[derive(Default)]
pub(crate) struct Key(Sha256);

impl Key {
    pub(crate) fn text(mut self, text: &str) -> Self {
        self.0.update(format!("string {text}\n"));
        self
    }

    /// Adds a file's bytes. For a directory, adds the names, permissions and bytes of all files below it.
    pub(crate) fn path(mut self, path: &Path) -> Result<Self> {
        if path.is_dir() {
            let mut files = files_below(path)?;
            files.sort_by_key(|(name, _)| [b"./", name.as_os_str().as_bytes()].concat());
            for (name, mode) in files {
                self.0.update([b"./", name.as_os_str().as_bytes(), format!(" {mode:o} ").as_bytes()].concat());
                self.file(&path.join(name))?;
            }
        } else {
            self.file(path)?;
        }
        Ok(self)
    }

    fn file(&mut self, path: &Path) -> Result<()> {
        let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        self.0.update(format!("{}  -\n", hex::encode(Sha256::digest(bytes))));
        Ok(())
    }

    /// Returns the key: 20 hex digits.
    pub(crate) fn finish(self) -> String {
        let mut digits = hex::encode(self.0.finalize());
        digits.truncate(20);
        digits
    }
}

/// Returns the regular files below a directory, with their permissions. The paths are relative to the directory.
pub(crate) fn files_below(top: &Path) -> Result<Vec<(PathBuf, u32)>> {
    let (mut files, mut rest) = (Vec::new(), vec![top.to_path_buf()]);
    while let Some(directory) = rest.pop() {
        let entries = fs::read_dir(&directory).with_context(|| format!("cannot read {}", directory.display()))?;
        for entry in entries {
            let entry = entry.with_context(|| format!("cannot read {}", directory.display()))?;
            let kind = entry.file_type().with_context(|| entry.path().display().to_string())?;
            if kind.is_dir() {
                rest.push(entry.path());
            } else if kind.is_file() {
                let mode = entry.metadata().with_context(|| entry.path().display().to_string())?.permissions().mode();
                let path = entry.path();
                files.push((path.strip_prefix(top).unwrap_or(&path).to_path_buf(), mode & 0o7777));
            }
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Earlier versions computed the keys with `sha256sum` in the shell, and the keys must stay the same. Other keys would invalidate
    /// cache entries that take long to build.
    #[test]
    fn keys_are_those_of_earlier_versions() {
        let dir = tempfile::tempdir().unwrap();
        let (file, tree) = (dir.path().join("file"), dir.path().join("tree"));
        fs::write(&file, "one\n").unwrap();
        fs::create_dir_all(tree.join("sub")).unwrap();
        for (name, mode) in [("sub/b c", 0o644), ("a", 0o755)] {
            fs::write(tree.join(name), name).unwrap();
            fs::set_permissions(tree.join(name), fs::Permissions::from_mode(mode)).unwrap();
        }

        let key = |key: Key| key.text("a b").path(&file).unwrap().path(&tree).unwrap().finish();

        let script = r#"
            { echo 'string a b'; sha256sum <"$1"; cd "$2"
              printf './a 755 '; sha256sum <a; printf './sub/b c 644 '; sha256sum <'sub/b c'; } | sha256sum | cut -c1-20"#;
        let shell = std::process::Command::new("sh").args(["-c", script, "sh"]).arg(&file).arg(&tree).output().unwrap();
        assert_eq!(key(Key::default()), String::from_utf8(shell.stdout).unwrap().trim());
        assert_ne!(key(Key::default()), key(Key::default().text("")));
    }
}

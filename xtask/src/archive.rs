// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! cpio archive of a root file system, built in memory.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, Result};
use cpio::newc;

const DIRECTORY: u32 = 0o040_755;
const LINK: u32 = 0o120_777;
const PROGRAM: u32 = 0o100_755;
const FILE: u32 = 0o100_644;

/// Mode and bytes of each file. The key is the file's path without a leading slash. All files belong to root and have no time stamp.
#[derive(Debug, Default)]
pub struct Archive(BTreeMap<String, (u32, Vec<u8>)>);

impl Archive {
    pub(crate) fn directory(&mut self, path: &str) {
        let mut parent = String::new();
        for part in path.split('/').filter(|part| !part.is_empty()) {
            if !parent.is_empty() {
                parent.push('/');
            }
            parent.push_str(part);
            self.0.entry(parent.clone()).or_insert((DIRECTORY, Vec::new()));
        }
    }

    pub(crate) fn link(&mut self, path: &str, target: &str) {
        self.add(path, LINK, target.into());
    }

    /// Adds an executable file with the bytes of `source`.
    pub(crate) fn program(&mut self, path: &str, source: &Path) -> Result<()> {
        self.executable(path, fs::read(source).with_context(|| format!("cannot read {}", source.display()))?);
        Ok(())
    }

    /// Adds an executable file and its parent directories.
    pub fn executable(&mut self, path: &str, bytes: Vec<u8>) {
        self.add(path, PROGRAM, bytes);
    }

    pub(crate) fn file(&mut self, path: &str, bytes: Vec<u8>) {
        self.add(path, FILE, bytes);
    }

    pub(crate) fn has(&self, path: &str) -> bool {
        self.0.contains_key(path)
    }

    /// Returns the archive. Directories come before their contents.
    ///
    /// # Errors
    /// Fails if a file has 4 GiB or more.
    pub fn bytes(&self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        self.write(&mut bytes).context("cannot pack an initramfs")?;
        Ok(bytes)
    }

    fn add(&mut self, path: &str, mode: u32, bytes: Vec<u8>) {
        let path = path.trim_start_matches('/');
        if let Some((parent, _)) = path.rsplit_once('/') {
            self.directory(parent);
        }
        self.0.insert(path.into(), (mode, bytes));
    }

    fn write(&self, out: &mut Vec<u8>) -> io::Result<()> {
        for (number, (path, (mode, bytes))) in (1..).zip(&self.0) {
            let size = u32::try_from(bytes.len()).map_err(io::Error::other)?;
            let mut writer = newc::Builder::new(path).ino(number).mode(*mode).write(&mut *out, size);
            writer.write_all(bytes)?;
            writer.finish()?;
        }
        newc::trailer(&mut *out)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_follow_their_directories() {
        let mut archive = Archive::default();
        archive.link("usr/bin", "../bin");
        archive.file("/lib64/deep/x", b"abc".to_vec());

        let bytes = archive.bytes().unwrap();

        let mut rest = bytes.as_slice();
        let mut seen = Vec::new();
        loop {
            let mut reader = newc::Reader::new(rest).unwrap();
            if reader.entry().is_trailer() {
                break;
            }
            let (name, mode) = (reader.entry().name().to_owned(), reader.entry().mode());
            let mut content = Vec::new();
            io::copy(&mut reader, &mut content).unwrap();
            seen.push((name, mode, String::from_utf8(content).unwrap()));
            rest = reader.finish().unwrap();
        }
        let entry = |name: &str, mode, content: &str| (name.to_owned(), mode, content.to_owned());
        let expected = [
            entry("lib64", DIRECTORY, ""),
            entry("lib64/deep", DIRECTORY, ""),
            entry("lib64/deep/x", FILE, "abc"),
            entry("usr", DIRECTORY, ""),
            entry("usr/bin", LINK, "../bin"),
        ];
        assert_eq!(seen, expected);
    }
}

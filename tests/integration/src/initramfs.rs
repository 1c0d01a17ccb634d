// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Adds the guest's job and other files to the base initramfs by appending a second cpio archive. The kernel unpacks the second
//! archive over the first.
//!
//! Source: Linux `Documentation/driver-api/early-userspace/buffer-format.rst`. Several archives may follow each other, and
//! each archive may be compressed. Uncompressed archives are aligned to four bytes.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use carom_tools::archive::Archive;

/// File to add to the guest's initramfs.
#[derive(Debug, Clone)]
pub(crate) struct Extra {
    /// Path in the guest without the leading slash.
    pub(crate) path: String,
    /// Contents.
    pub(crate) bytes: Vec<u8>,
}

/// Writes `base` followed by an archive of `extras` to `target`. All extras are executable.
pub(crate) fn append(base: &Path, extras: &[Extra], target: &Path) -> Result<()> {
    let mut bytes = fs::read(base).with_context(|| format!("cannot read the initramfs {}", base.display()))?;
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    let mut archive = Archive::default();
    extras.iter().for_each(|extra| archive.executable(&extra.path, extra.bytes.clone()));
    bytes.extend(archive.bytes().context("cannot pack the guest's job")?);
    fs::write(target, bytes).with_context(|| format!("cannot write the initramfs {}", target.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn appended_archive_starts_aligned_and_holds_the_files() {
        let dir = tempfile::tempdir().unwrap();
        let (base, target) = (dir.path().join("base"), dir.path().join("target"));
        fs::write(&base, b"12345").unwrap();

        append(&base, &[Extra { path: "job".into(), bytes: b"echo hi\n".to_vec() }], &target).unwrap();

        let bytes = fs::read(&target).unwrap();
        assert_eq!(&bytes[..8], b"12345\0\0\0");
        let mut archive = Archive::default();
        archive.executable("job", b"echo hi\n".to_vec());
        assert_eq!(&bytes[8..], archive.bytes().unwrap());
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Gives a guest its job: a second cpio archive behind the base initramfs, which the kernel unpacks over the first.
//!
//! Source: Linux `Documentation/driver-api/early-userspace/buffer-format.rst` (several archives in a row, each compressed
//! or not, the uncompressed ones aligned to four bytes).

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context, Result};
use cpio::newc;

/// A file added to the guest's initramfs.
#[derive(Debug, Clone)]
pub(crate) struct Extra {
    /// Path in the guest without the leading slash; its directory exists in the base initramfs.
    pub(crate) path: String,
    /// Contents.
    pub(crate) bytes: Vec<u8>,
}

/// Writes `base` followed by an archive of `extras`, all of them executable, to `target`.
pub(crate) fn append(base: &Path, extras: &[Extra], target: &Path) -> Result<()> {
    let mut bytes = fs::read(base).with_context(|| format!("reading the initramfs {}", base.display()))?;
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    write_archive(&mut bytes, extras).context("packing the guest's job")?;
    File::create(target)
        .and_then(|mut file| file.write_all(&bytes))
        .with_context(|| format!("writing the initramfs {}", target.display()))
}

fn write_archive(out: &mut Vec<u8>, extras: &[Extra]) -> io::Result<()> {
    for extra in extras {
        let size = u32::try_from(extra.bytes.len()).map_err(io::Error::other)?;
        let mut writer = newc::Builder::new(&extra.path).mode(0o100_755).write(&mut *out, size);
        writer.write_all(&extra.bytes)?;
        writer.finish()?;
    }
    newc::trailer(&mut *out)?;
    Ok(())
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
        let mut reader = newc::Reader::new(&bytes[8..]).unwrap();
        assert_eq!((reader.entry().name(), reader.entry().mode()), ("job", 0o100_755));
        let mut content = Vec::new();
        io::copy(&mut reader, &mut content).unwrap();
        assert_eq!(content, b"echo hi\n");
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Kernels of Debian packages.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::tools::Tools;

/// Configuration that Debian builds a kernel with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Flavour {
    /// Configuration for all machines (`amd64`).
    Standard,
    /// Configuration for virtual machines (`cloud-amd64`), with fewer drivers.
    Cloud,
}

impl Tools<'_> {
    /// Returns the unpacked package of Debian's current kernel 6.12.
    pub(crate) fn debian_kernel(&self, flavour: Flavour) -> Result<PathBuf> {
        let package = match flavour {
            Flavour::Standard => "linux-image-6.12-amd64",
            Flavour::Cloud => "linux-image-6.12-cloud-amd64",
        };
        self.fetch_deb(&self.debian_depends(package, "linux-image-6.12", |_| true)?)
    }
}

/// Returns the kernel in an unpacked Debian package, and its release.
pub(crate) fn packaged_kernel(dir: &Path) -> Result<(PathBuf, String)> {
    let boot = dir.join("boot");
    let entries = fs::read_dir(&boot).with_context(|| format!("cannot read {}", boot.display()))?;
    let found = entries.flatten().find_map(|entry| {
        let release = entry.file_name().to_str()?.strip_prefix("vmlinuz-")?.to_owned();
        Some((entry.path(), release))
    });
    let (kernel, release) = found.with_context(|| format!("{} contains no kernel", dir.display()))?;
    ensure!(kernel.is_file(), "{} is not a file", kernel.display());
    Ok((kernel, release))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_of_a_package_is_found_with_its_release() {
        let dir = tempfile::tempdir().unwrap();
        assert!(packaged_kernel(dir.path()).is_err());
        fs::create_dir(dir.path().join("boot")).unwrap();
        for name in ["config-6.1.0-41-amd64", "vmlinuz-6.1.0-41-amd64"] {
            fs::write(dir.path().join("boot").join(name), "").unwrap();
        }
        let (kernel, release) = packaged_kernel(dir.path()).unwrap();
        assert_eq!((kernel, release.as_str()), (dir.path().join("boot/vmlinuz-6.1.0-41-amd64"), "6.1.0-41-amd64"));
    }
}

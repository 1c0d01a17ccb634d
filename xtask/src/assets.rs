// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Files that guests need: the VMM, its client, kernels and initramfs. Their paths are passed in environment variables, which
//! `tests/integration/src/site.rs` reads.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, bail};

use crate::initramfs::GuestInitramfs;
use crate::kernel::GuestKernel;
use crate::key::Key;
use crate::modules::Modules;
use crate::packaged_kernel::{Flavour, packaged_kernel};
use crate::tools::{Tools, Usage};
use crate::work_dir;

/// Environment variables for a program.
pub(crate) type Variables = Vec<(&'static str, OsString)>;

impl Tools<'_> {
    /// Calls `run` with a new results directory in `place`. Afterwards copies the results to `keep`, if this directory is given.
    pub(crate) fn with_results<T>(
        &self,
        place: &Path,
        name: &str,
        keep: Option<&Path>,
        run: impl FnOnce(&Path) -> Result<T>,
    ) -> Result<T> {
        let out = work_dir::create(place, name)?;
        let done = run(out.path());
        self.progress.end();
        if let Some(keep) = keep {
            keep_results(self, out.path(), keep);
        }
        done
    }

    /// Installs the Debian packages that all guests need.
    pub(crate) fn need_guest_packages(&self) -> Result<()> {
        self.need_packages("building and running guests", &["qemu-system-x86", "gcc", "libc6-dev"])
    }

    /// Builds the VMM with optimization.
    pub(crate) fn carom(&self) -> Result<Variables> {
        self.build("carom", &["build", "--release", "--locked", "-p", "vmm", "--bin", "carom"])?;
        Ok(vec![("CAROM_BIN", self.target_dir()?.join("release/carom").into())])
    }

    /// Builds a guest kernel and its initramfs.
    pub(crate) fn guest(&self, kernel: &GuestKernel) -> Result<Variables> {
        let kernel = self.guest_kernel(kernel)?;
        let initramfs = self.guest_initramfs(&GuestInitramfs::default())?;
        Ok(vec![("CAROM_GUEST_KERNEL", kernel.into()), ("CAROM_GUEST_INITRAMFS", initramfs.into())])
    }

    /// Builds the patched kernel of the newest series that the guest patch supports.
    pub(crate) fn newer_guest(&self) -> Result<Variables> {
        let dir = self.guest_kernel(&GuestKernel { series: Some("7.3".into()), ..GuestKernel::default() })?;
        Ok(vec![("CAROM_NEWER_KERNEL", dir.join("bzImage").into())])
    }

    /// Builds the patched kernels of both series with the function profiler and trace points.
    pub(crate) fn traced_guests(&self) -> Result<Variables> {
        let mut variables = Variables::new();
        for (variable, series) in [("CAROM_PROFILE_KERNEL", None), ("CAROM_NEWER_PROFILE_KERNEL", Some("7.3".into()))] {
            let dir = self.guest_kernel(&GuestKernel { series, profile: true, ..GuestKernel::default() })?;
            variables.push((variable, dir.join("bzImage").into()));
        }
        Ok(variables)
    }

    /// Fetches Debian's unmodified kernel 6.12 and builds an initramfs with its modules. Bookworm's original kernel, 6.1, cannot be used,
    /// because it is built without virtio-iommu.
    pub(crate) fn stock_guest(&self) -> Result<Variables> {
        let dir = self.debian_kernel(Flavour::Standard)?;
        let (kernel, release) = packaged_kernel(&dir)?;
        let modules = Some(dir.join(Modules::PLACE).join(release));
        let initramfs = self.guest_initramfs(&GuestInitramfs {
            modules,
            // ext4 asks the kernel's crypto API for crc32c at run time, so modinfo does not list crc32c_generic as a dependency.
            with: ["pvpanic_pci", "i6300esb", "virtio_pmem", "nd_pmem", "crc32c_generic", "ext4"]
                .map(Into::into)
                .into(),
        })?;
        Ok(vec![("CAROM_STOCK_KERNEL", kernel.into()), ("CAROM_STOCK_INITRAMFS", initramfs.into())])
    }

    /// Builds the programs that tests start in guests:
    /// - `edu-dma` drives the edu device,
    /// - `restore-check` reports lost data,
    /// - `vsock` opens sockets to the host,
    /// - `string-io` is a kernel that reads an I/O port.
    pub(crate) fn guest_programs(&self) -> Result<Variables> {
        let programs =
            [("CAROM_EDU_DMA", "edu-dma"), ("CAROM_RESTORE_CHECK", "restore-check"), ("CAROM_VSOCK", "vsock")];
        let mut variables: Variables = programs
            .map(|(variable, name)| Ok((variable, self.guest_program(name)?.into())))
            .into_iter()
            .collect::<Result<_>>()?;
        variables.push(("CAROM_STRING_IO", self.bare_kernel("string-io")?.into()));
        Ok(variables)
    }

    /// Builds a static program that runs in guests.
    pub(crate) fn guest_program(&self, name: &str) -> Result<PathBuf> {
        self.compiled(name, "c", &["-O2", "-static", "-pthread", "-Wall", "-Wextra", "-Werror"])
    }

    /// Builds a kernel that consists of one assembly file.
    fn bare_kernel(&self, name: &str) -> Result<PathBuf> {
        let link = "-Wl,-N,-Ttext=0x100000,--build-id=none,--no-warn-rwx-segments";
        self.compiled(name, "S", &["-nostdlib", "-static", "-no-pie", link])
    }

    fn compiled(&self, name: &str, extension: &str, flags: &[&str]) -> Result<PathBuf> {
        let source = self.checkout.join(format!("tests/integration/guest/{name}.{extension}"));
        let dir = self.cached(name, &Key::default().path(&source)?.finish(), |dir| {
            self.run(Command::new("gcc").args(flags).arg("-o").arg(dir.join(name)).arg(&source))
        })?;
        Ok(dir.join(name))
    }

    /// Binds a PCI device of this host to vfio-pci until the returned value is dropped.
    pub(crate) fn bind(&self, address: &str) -> Result<Bound> {
        let script = self.checkout.join("scripts/lib/vfio-bind");
        self.run(Command::new(&script).arg(address))?;
        let mut release = Command::new(script);
        release.args(["--release", address]);
        Ok(Bound(release))
    }
}

/// PCI device bound to vfio-pci. Dropping this value returns the device to its own driver.
pub(crate) struct Bound(Command);

impl Drop for Bound {
    fn drop(&mut self) {
        // Ignore the exit status: the script reports its own errors.
        let _ = self.0.status();
    }
}

/// Returns variables for programs that run on this host and use the drive at `address`.
pub(crate) fn direct_variables(address: &str, out: &Path) -> Variables {
    vec![("CAROM_NVME", address.into()), ("CAROM_RIG", "direct".into()), ("CAROM_OUT", out.into())]
}

/// Checks that the value of `--direct` is a PCI address.
pub(crate) fn check_pci_address(address: &str) -> Result<()> {
    if !is_pci_address(address) {
        bail!(Usage(format!("--direct '{address}': must be a PCI address such as 0000:01:00.0")));
    }
    Ok(())
}

/// True if this is a PCI address such as `0000:01:00.0`.
fn is_pci_address(text: &str) -> bool {
    let hex = |part: &str, digits: usize| {
        part.len() == digits && part.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
    };
    let parts: Vec<&str> = text.split([':', '.']).collect();
    let [domain, bus, device, function] = parts[..] else { return false };
    let shape = hex(domain, 4) && hex(bus, 2) && hex(device, 2) && matches!(function.as_bytes(), [b'0'..=b'7']);
    shape && text == format!("{domain}:{bus}:{device}.{function}")
}

/// Copies the results of a run from `out` to the directory `keep`.
fn keep_results(tools: &Tools, out: &Path, keep: &Path) {
    let copied = std::fs::create_dir_all(keep).is_ok()
        && Command::new("cp").arg("-r").arg(out.join(".")).arg(keep).status().is_ok_and(|status| status.success());
    if !copied {
        tools.progress.say(&format!("cannot copy the results to {}", keep.display()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::with_tools;

    #[test]
    fn only_complete_pci_addresses_are_accepted() {
        assert!(is_pci_address("0000:01:00.0") && is_pci_address("ffff:ab:1f.7"));
        for other in ["", "01:00.0", "0000:01:00.8", "0000:01:00:0", "0000.01.00.0", "0000:01:0g.0", "0000:01:00.0 "] {
            assert!(!is_pci_address(other), "{other}");
        }
    }

    #[test]
    fn all_results_of_a_run_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let (out, keep) = (dir.path().join("out"), dir.path().join("a/keep"));
        std::fs::create_dir_all(out.join("guests")).unwrap();
        std::fs::write(out.join("guests/a.console"), "").unwrap();

        with_tools("/".as_ref(), "/".as_ref(), |tools| keep_results(tools, &out, &keep));

        assert!(keep.join("guests/a.console").exists());
    }
}

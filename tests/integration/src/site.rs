// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Environment of guests: programs, kernels and devices. The scripts export them as environment variables.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use carom_tools::peers::{self, OtherVmm};

/// Programs, kernels and devices for running guests. [`Site::from_env`] reads them from the environment.
#[derive(Debug, Clone, Default)]
pub struct Site {
    /// VMM under test (`CAROM_BIN`).
    pub carom: PathBuf,
    /// Command-line client of the VMM (`CAROM_REMOTE`). The demo does not need it.
    pub remote: Option<PathBuf>,
    /// Patched guest kernel as a bzImage (`CAROM_GUEST_KERNEL`/bzImage).
    pub kernel: PathBuf,
    /// Patched guest kernel as an ELF file with a PVH entry (`CAROM_GUEST_KERNEL`/vmlinux).
    pub kernel_elf: PathBuf,
    /// Other guest kernel for comparison, as a bzImage (`CAROM_BASE_KERNEL`).
    pub base_kernel: Option<PathBuf>,
    /// Patched kernel with the function profiler and trace points, as a bzImage (`CAROM_PROFILE_KERNEL`).
    pub profile_kernel: Option<PathBuf>,
    /// Patched kernel of a newer series with the function profiler (`CAROM_NEWER_PROFILE_KERNEL`).
    pub newer_profile_kernel: Option<PathBuf>,
    /// Patched kernel of a newer series as a bzImage (`CAROM_NEWER_KERNEL`). The demo does not need it.
    pub newer_kernel: Option<PathBuf>,
    /// Patched kernel with module support as a bzImage, for `scripts/bench` (`CAROM_MODULAR_KERNEL`). The modules of
    /// `guest/bench` are in the same directory.
    pub modular: Option<PathBuf>,
    /// The modular kernel without the patch (`CAROM_MODULAR_STOCK_KERNEL`).
    pub modular_stock: Option<PathBuf>,
    /// Initramfs for these kernels (`CAROM_GUEST_INITRAMFS`).
    pub initramfs: PathBuf,
    /// Debian's unmodified kernel (`CAROM_STOCK_KERNEL`). The demo does not need it.
    pub stock_kernel: Option<PathBuf>,
    /// Initramfs with the modules of Debian's kernel (`CAROM_STOCK_INITRAMFS`).
    pub stock_initramfs: Option<PathBuf>,
    /// Directory of a Debian system made of packages (`CAROM_DISTRIBUTION`), see `carom_tools::distribution`.
    pub distribution: Option<PathBuf>,
    /// Patched kernel with the options that Debian's services need, as an ELF file with a PVH entry
    /// (`CAROM_DISTRIBUTION_KERNEL`).
    pub distribution_kernel: Option<PathBuf>,
    /// Directory with firmware and a disk (`CAROM_FIRMWARE`), see `carom_tools::firmware`.
    pub firmware: Option<PathBuf>,
    /// Carom as a Debian package (`CAROM_PACKAGE`).
    pub package: Option<PathBuf>,
    /// Directory with Debian packages of a patched kernel and its headers (`CAROM_KERNEL_PACKAGES`).
    pub kernel_packages: Option<PathBuf>,
    /// Static guest program that drives the edu device (`CAROM_EDU_DMA`).
    pub edu_dma: Option<PathBuf>,
    /// Static guest program that checks that a restored guest continues correctly (`CAROM_RESTORE_CHECK`).
    pub restore_check: Option<PathBuf>,
    /// Static guest program that opens vsock connections (`CAROM_VSOCK`).
    pub vsock: Option<PathBuf>,
    /// Kernel whose only work is to read an I/O port by a string instruction (`CAROM_STRING_IO`).
    pub string_io: Option<PathBuf>,
    /// Static guest program for measurements with many guests (`CAROM_TENANT`).
    pub tenant: Option<PathBuf>,
    /// Test program of `vmm` with a malicious guest (`CAROM_HOSTILE_GUEST`).
    pub hostile_guest: Option<PathBuf>,
    /// iperf3, for this machine and for guests (`CAROM_IPERF3`). Only `scripts/bench` needs it.
    pub iperf: Option<PathBuf>,
    /// QEMU's program (`CAROM_QEMU`). If the variable is not set, QEMU comes from the `PATH`.
    pub qemu: Option<PathBuf>,
    /// Cloud Hypervisor, for comparison (`CAROM_CLOUD_HYPERVISOR`).
    pub cloud_hypervisor: Option<PathBuf>,
    /// Another build of Carom for comparison (`CAROM_BASE_VMM`).
    pub base_vmm: Option<PathBuf>,
    /// Another VMM for comparison, started by a template (`CAROM_OTHER_VMM`).
    pub other_vmm: Option<OtherVmm>,
    /// PCI addresses of the guests' NVMe drives, at least one (`CAROM_NVME`, `CAROM_NVME2`).
    pub nvme: Vec<String>,
    /// PCI addresses of additional NVMe drives, separated by blanks (`CAROM_MORE_NVME`).
    pub more_nvme: Vec<String>,
    /// PCI address of an NVMe drive that discards writes (`CAROM_NULL_NVME`).
    pub null_nvme: Option<String>,
    /// Offset on the second drive of `nvme` at which all reads fail, in bytes (`CAROM_NVME2_BAD`).
    pub nvme2_bad: Option<String>,
    /// PCI address of QEMU's edu device (`CAROM_EDU`).
    pub edu: Option<String>,
    /// PCI address of a second edu device (`CAROM_EDU2`).
    pub edu2: Option<String>,
    /// PCI address of an edu device with 28 address bits (`CAROM_EDU_NARROW`).
    pub edu_narrow: Option<String>,
    /// PCI address of a network card (`CAROM_NET`). Its network has an echo server at 10.0.2.100 port 7.
    pub net: Option<String>,
    /// PCI address of a device below a root port (`CAROM_AER`). The kernel handles errors of this device.
    pub aer: Option<String>,
    /// PCI address of an xHCI host controller with a drive (`CAROM_USB`).
    pub usb: Option<String>,
    /// PCI address of an igb network card, whose network is like the network of `net` (`CAROM_IGB`).
    pub igb: Option<String>,
    /// PCI address of an AHCI controller with a drive (`CAROM_AHCI`).
    pub ahci: Option<String>,
    /// Block device that the host may use as swap (`CAROM_SWAP`). All its data is lost.
    pub swap: Option<PathBuf>,
    /// Directory for consoles and results (`CAROM_OUT`).
    pub out: PathBuf,
    /// File to which counts of instructions are appended, if the rig counts them (`CAROM_INSTRUCTIONS`).
    pub instructions: Option<PathBuf>,
    /// True if devices use IOMMUFD (`CAROM_IOMMUFD` is `on`).
    pub iommufd: bool,
    /// Machine that runs the guests (`CAROM_RIG`): `tcg` or `kvm` for the rig with this accelerator, or `direct` for this host
    /// without the rig.
    pub rig: String,
}

impl Site {
    /// Reads the site from the environment.
    ///
    /// # Errors
    /// Fails if a variable or a file is missing. The error names the variable or the file.
    pub fn from_env() -> Result<Self> {
        let kernel_dir = existing("CAROM_GUEST_KERNEL")?;
        let site = Self {
            carom: existing("CAROM_BIN")?,
            remote: optional("CAROM_REMOTE")?,
            kernel: kernel_dir.join("bzImage"),
            kernel_elf: kernel_dir.join("vmlinux"),
            base_kernel: optional("CAROM_BASE_KERNEL")?,
            profile_kernel: optional("CAROM_PROFILE_KERNEL")?,
            newer_profile_kernel: optional("CAROM_NEWER_PROFILE_KERNEL")?,
            newer_kernel: optional("CAROM_NEWER_KERNEL")?,
            modular: optional("CAROM_MODULAR_KERNEL")?,
            modular_stock: optional("CAROM_MODULAR_STOCK_KERNEL")?,
            initramfs: existing("CAROM_GUEST_INITRAMFS")?,
            stock_kernel: optional("CAROM_STOCK_KERNEL")?,
            stock_initramfs: optional("CAROM_STOCK_INITRAMFS")?,
            distribution: optional("CAROM_DISTRIBUTION")?,
            distribution_kernel: optional("CAROM_DISTRIBUTION_KERNEL")?,
            firmware: optional("CAROM_FIRMWARE")?,
            package: optional("CAROM_PACKAGE")?,
            kernel_packages: optional("CAROM_KERNEL_PACKAGES")?,
            edu_dma: optional("CAROM_EDU_DMA")?,
            restore_check: optional("CAROM_RESTORE_CHECK")?,
            vsock: optional("CAROM_VSOCK")?,
            string_io: optional("CAROM_STRING_IO")?,
            tenant: optional("CAROM_TENANT")?,
            hostile_guest: optional("CAROM_HOSTILE_GUEST")?,
            iperf: optional("CAROM_IPERF3")?,
            qemu: peers::program(peers::QEMU)?,
            cloud_hypervisor: peers::program(peers::CLOUD_HYPERVISOR)?,
            base_vmm: peers::program(peers::BASE)?,
            other_vmm: OtherVmm::from_env()?,
            nvme: [Some(variable("CAROM_NVME")?), env::var("CAROM_NVME2").ok()].into_iter().flatten().collect(),
            more_nvme: words("CAROM_MORE_NVME"),
            null_nvme: env::var("CAROM_NULL_NVME").ok(),
            nvme2_bad: env::var("CAROM_NVME2_BAD").ok(),
            edu: env::var("CAROM_EDU").ok(),
            edu2: env::var("CAROM_EDU2").ok(),
            edu_narrow: env::var("CAROM_EDU_NARROW").ok(),
            net: env::var("CAROM_NET").ok(),
            aer: env::var("CAROM_AER").ok(),
            usb: env::var("CAROM_USB").ok(),
            igb: env::var("CAROM_IGB").ok(),
            ahci: env::var("CAROM_AHCI").ok(),
            swap: optional("CAROM_SWAP")?,
            out: existing("CAROM_OUT")?,
            // This file does not exist before the first count.
            instructions: env::var_os("CAROM_INSTRUCTIONS").map(PathBuf::from),
            iommufd: env::var("CAROM_IOMMUFD").is_ok_and(|value| value == "on"),
            rig: env::var("CAROM_RIG").unwrap_or_else(|_| "direct".into()),
        };
        for file in [&site.kernel, &site.kernel_elf] {
            ensure!(file.is_file(), "CAROM_GUEST_KERNEL: {} does not exist", file.display());
        }
        Ok(site)
    }

    /// Returns QEMU's program.
    #[must_use]
    pub fn qemu(&self) -> &Path {
        self.qemu.as_deref().unwrap_or(Path::new("qemu-system-x86_64"))
    }

    /// Returns the sysfs directory of a PCI device.
    #[must_use]
    pub fn sysfs(address: &str) -> PathBuf {
        Path::new("/sys/bus/pci/devices").join(address)
    }
}

fn variable(name: &str) -> Result<String> {
    env::var(name).with_context(|| format!("{name} is not set; run scripts/demo or scripts/test, which set it"))
}

/// Returns the words of a variable, or nothing if it is not set.
fn words(name: &str) -> Vec<String> {
    env::var(name).unwrap_or_default().split_whitespace().map(String::from).collect()
}

fn existing(name: &str) -> Result<PathBuf> {
    let path = PathBuf::from(variable(name)?);
    ensure!(path.exists(), "{name}: {} does not exist", path.display());
    Ok(path)
}

fn optional(name: &str) -> Result<Option<PathBuf>> {
    if env::var_os(name).is_none() { Ok(None) } else { existing(name).map(Some) }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Where guests run: the programs, kernels and devices at hand, as the scripts export them.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use carom_tools::peers::{self, OtherVmm};

/// Programs, kernels and devices for running guests, read from the environment by [`Site::from_env`].
#[derive(Debug, Clone, Default)]
pub struct Site {
    /// The VMM under test (`CAROM_BIN`).
    pub carom: PathBuf,
    /// Its command-line client (`CAROM_REMOTE`); the demo does without.
    pub remote: Option<PathBuf>,
    /// The patched guest kernel as a bzImage (`CAROM_GUEST_KERNEL`/bzImage).
    pub kernel: PathBuf,
    /// The same kernel as an ELF file with a PVH entry (`CAROM_GUEST_KERNEL`/vmlinux).
    pub kernel_elf: PathBuf,
    /// An earlier one that measurements compare it with, as a bzImage (`CAROM_BASE_KERNEL`).
    pub base_kernel: Option<PathBuf>,
    /// The patched kernel with the function profiler, and so with trace points, as a bzImage (`CAROM_PROFILE_KERNEL`).
    pub profile_kernel: Option<PathBuf>,
    /// The same of a newer series (`CAROM_NEWER_PROFILE_KERNEL`).
    pub newer_profile_kernel: Option<PathBuf>,
    /// The patched kernel of a newer series as a bzImage (`CAROM_NEWER_KERNEL`); the demo does without.
    pub newer_kernel: Option<PathBuf>,
    /// The patched kernel with modules as a bzImage, beside which are those of `guest/bench` (`CAROM_MODULAR_KERNEL`), for
    /// `scripts/bench`.
    pub modular: Option<PathBuf>,
    /// The same without the patch (`CAROM_MODULAR_STOCK_KERNEL`).
    pub modular_stock: Option<PathBuf>,
    /// Initramfs for these kernels (`CAROM_GUEST_INITRAMFS`).
    pub initramfs: PathBuf,
    /// Debian's own kernel (`CAROM_STOCK_KERNEL`); the demo does without.
    pub stock_kernel: Option<PathBuf>,
    /// Initramfs with that kernel's modules (`CAROM_STOCK_INITRAMFS`).
    pub stock_initramfs: Option<PathBuf>,
    /// Directory of a Debian of packages (`CAROM_DISTRIBUTION`), see `carom_tools::distribution`.
    pub distribution: Option<PathBuf>,
    /// The patched kernel with what its services take, as an ELF file with a PVH entry (`CAROM_DISTRIBUTION_KERNEL`).
    pub distribution_kernel: Option<PathBuf>,
    /// Directory of firmware with a disk (`CAROM_FIRMWARE`), see `carom_tools::firmware`.
    pub firmware: Option<PathBuf>,
    /// Carom as a Debian package (`CAROM_PACKAGE`).
    pub package: Option<PathBuf>,
    /// Static program that runs in guests and steers the edu device (`CAROM_EDU_DMA`).
    pub edu_dma: Option<PathBuf>,
    /// Static program that works in guests and tells what of it went wrong (`CAROM_WITNESS`).
    pub witness: Option<PathBuf>,
    /// Static program that is at the other end of sockets to guests (`CAROM_VSOCK`).
    pub vsock: Option<PathBuf>,
    /// Kernel that reads an I/O port by a string instruction, and no more (`CAROM_STRING_IO`).
    pub string_io: Option<PathBuf>,
    /// Static program that works in guests of which a host has many (`CAROM_TENANT`).
    pub tenant: Option<PathBuf>,
    /// The test with a guest that means harm (`CAROM_HOSTILE_GUEST`), of `vmm`.
    pub hostile_guest: Option<PathBuf>,
    /// iperf3, which runs here and in guests (`CAROM_IPERF3`); only the suite needs it.
    pub iperf: Option<PathBuf>,
    /// QEMU, where it is not the one of the `PATH` (`CAROM_QEMU`).
    pub qemu: Option<PathBuf>,
    /// Cloud Hypervisor, a further peer of the demo (`CAROM_CLOUD_HYPERVISOR`).
    pub cloud_hypervisor: Option<PathBuf>,
    /// Another build of Carom, which measurements compare it with (`CAROM_BASE_VMM`).
    pub base_vmm: Option<PathBuf>,
    /// A further peer, of which there is a template (`CAROM_OTHER_VMM`).
    pub other_vmm: Option<OtherVmm>,
    /// PCI addresses of the NVMe drives that guests get, at least one (`CAROM_NVME`, `CAROM_NVME2`).
    pub nvme: Vec<String>,
    /// Further ones (`CAROM_MORE_NVME`, with blanks between), where there are any.
    pub more_nvme: Vec<String>,
    /// One that keeps nothing (`CAROM_NULL_NVME`), where there is one.
    pub null_nvme: Option<String>,
    /// Byte of the second of `nvme` of which each read fails (`CAROM_NVME2_BAD`).
    pub nvme2_bad: Option<String>,
    /// PCI address of QEMU's edu device, where there is one (`CAROM_EDU`).
    pub edu: Option<String>,
    /// PCI address of another one (`CAROM_EDU2`).
    pub edu2: Option<String>,
    /// PCI address of one that has 28 address bits (`CAROM_EDU_NARROW`).
    pub edu_narrow: Option<String>,
    /// PCI address of a network card whose network has a server that sends back what it gets, at 10.0.2.100 port 7
    /// (`CAROM_NET`).
    pub net: Option<String>,
    /// PCI address of a device below a root port, whose errors the kernel handles (`CAROM_AER`).
    pub aer: Option<String>,
    /// PCI address of an xHCI host controller that has a drive (`CAROM_USB`).
    pub usb: Option<String>,
    /// PCI address of a network card of igb's, with a network like that of `net` (`CAROM_IGB`).
    pub igb: Option<String>,
    /// PCI address of an AHCI controller that has a drive (`CAROM_AHCI`).
    pub ahci: Option<String>,
    /// Block device to which the host may swap; what is on it is lost (`CAROM_SWAP`).
    pub swap: Option<PathBuf>,
    /// Directory for consoles and results (`CAROM_OUT`).
    pub out: PathBuf,
    /// File to which counts of instructions are added (`CAROM_INSTRUCTIONS`), where the rig counts them.
    pub instructions: Option<PathBuf>,
    /// Whether devices are reached by IOMMUFD (`CAROM_IOMMUFD` is `on`).
    pub iommufd: bool,
    /// How the machine is run: `tcg` or `kvm` in the rig, `direct` outside (`CAROM_RIG`).
    pub rig: String,
}

impl Site {
    /// Reads the site from the environment.
    ///
    /// # Errors
    /// Names the variable that is missing or the file that does not exist.
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
            edu_dma: optional("CAROM_EDU_DMA")?,
            witness: optional("CAROM_WITNESS")?,
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
            // Not there before the first count.
            instructions: env::var_os("CAROM_INSTRUCTIONS").map(PathBuf::from),
            iommufd: env::var("CAROM_IOMMUFD").is_ok_and(|value| value == "on"),
            rig: env::var("CAROM_RIG").unwrap_or_else(|_| "direct".into()),
        };
        for file in [&site.kernel, &site.kernel_elf] {
            ensure!(file.is_file(), "CAROM_GUEST_KERNEL: there is no {}", file.display());
        }
        Ok(site)
    }

    /// QEMU's program.
    #[must_use]
    pub fn qemu(&self) -> &Path {
        self.qemu.as_deref().unwrap_or(Path::new("qemu-system-x86_64"))
    }

    /// The sysfs directory of a PCI device.
    #[must_use]
    pub fn sysfs(address: &str) -> PathBuf {
        Path::new("/sys/bus/pci/devices").join(address)
    }
}

fn variable(name: &str) -> Result<String> {
    env::var(name).with_context(|| format!("{name} is not set; start this by scripts/demo or scripts/test"))
}

/// The words of a variable that may be missing.
fn words(name: &str) -> Vec<String> {
    env::var(name).unwrap_or_default().split_whitespace().map(String::from).collect()
}

fn existing(name: &str) -> Result<PathBuf> {
    let path = PathBuf::from(variable(name)?);
    ensure!(path.exists(), "{name}: there is no {}", path.display());
    Ok(path)
}

fn optional(name: &str) -> Result<Option<PathBuf>> {
    if env::var_os(name).is_none() { Ok(None) } else { existing(name).map(Some) }
}

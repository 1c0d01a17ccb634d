// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Requirements of tests.

use std::env;
use std::path::Path;

/// Character device of the kernel's module `aer_inject`, which injects device errors.
const AER_INJECT: &str = "/dev/aer_inject";

/// virtiofsd of Debian 12's `qemu-system-common`.
pub const VIRTIOFSD: &str = "/usr/lib/qemu/virtiofsd";

/// QEMU's storage daemon, also from Debian's `qemu-system-common`.
pub const STORAGE_DAEMON: &str = "/usr/bin/qemu-storage-daemon";

/// QEMU's program for images, from Debian's `qemu-utils`.
pub const QEMU_IMG: &str = "/usr/bin/qemu-img";

/// Program that creates device-mapper devices, from Debian's `dmsetup`.
pub const DMSETUP: &str = "/usr/sbin/dmsetup";

/// Service manager, from Debian's `systemd`.
pub const SYSTEMD: &str = "/lib/systemd/systemd";

/// Directory with the settings for injected failures of slab allocations (`CONFIG_FAILSLAB`).
pub const FAILING_ALLOCATIONS: &str = "/sys/kernel/debug/failslab";

/// Variable or file by which a requirement is checked.
enum Place {
    /// Environment variable that is set if the requirement is met.
    Variable(&'static str),
    /// File that exists if the requirement is met: a program of a Debian package, or a directory of a kernel with a certain
    /// option.
    Program(&'static str),
}

/// Requirement of a test: a device, program or service that the rig has and another host may lack. [`crate::Site`] describes
/// the devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// QEMU's edu device.
    Edu,
    /// A second edu device.
    Edu2,
    /// An edu device with 28 address bits.
    EduNarrow,
    /// A second NVMe drive.
    SecondDrive,
    /// A second NVMe drive whose reads fail at a known offset.
    FailingDrive,
    /// A network card whose network has an echo server.
    Net,
    /// A device below a root port, and the kernel module `aer_inject`, which injects errors of this device.
    ErrorInjection,
    /// A USB controller with a drive.
    Usb,
    /// An igb network card whose network has an echo server.
    Igb,
    /// An AHCI controller with a drive.
    Ahci,
    /// A vfio-pci device whose IOMMU group contains a device of another driver.
    NotViable,
    /// A Debian system made of packages.
    Distribution,
    /// Firmware, and a disk that it boots.
    Firmware,
    /// Carom as a Debian package.
    Package,
    /// Debian packages of a patched kernel and its headers.
    KernelPackages,
    /// A guest kernel with trace points.
    TracePoints,
    /// A guest kernel of the newer series with trace points.
    NewerTracePoints,
    /// A server that exports host directories.
    Virtiofsd,
    /// A server that exports disks.
    StorageDaemon,
    /// The program that makes and checks qcow2 images.
    QemuImg,
    /// A block device to which the host may swap.
    Swap,
    /// A directory with the programs of Kata Containers' runtime. The user must build these programs.
    KataRuntime,
    /// The program that creates device-mapper devices.
    Dmsetup,
    /// The service manager systemd, which a test starts in namespaces.
    Systemd,
    /// A kernel that can inject allocation failures, such as the rig's kernel with IOMMUFD.
    FailingAllocations,
}

impl Need {
    /// Returns the variable or file of the requirement.
    fn place(self) -> Place {
        Place::Variable(match self {
            Self::Edu => "CAROM_EDU",
            Self::Edu2 => "CAROM_EDU2",
            Self::EduNarrow => "CAROM_EDU_NARROW",
            Self::SecondDrive => "CAROM_NVME2",
            Self::FailingDrive => "CAROM_NVME2_BAD",
            Self::Net => "CAROM_NET",
            Self::ErrorInjection => "CAROM_AER",
            Self::Usb => "CAROM_USB",
            Self::Igb => "CAROM_IGB",
            Self::Ahci => "CAROM_AHCI",
            Self::NotViable => "CAROM_NOT_VIABLE",
            Self::Distribution => "CAROM_DISTRIBUTION",
            Self::Firmware => "CAROM_FIRMWARE",
            Self::Package => "CAROM_PACKAGE",
            Self::KernelPackages => "CAROM_KERNEL_PACKAGES",
            Self::TracePoints => "CAROM_PROFILE_KERNEL",
            Self::NewerTracePoints => "CAROM_NEWER_PROFILE_KERNEL",
            Self::Swap => "CAROM_SWAP",
            Self::KataRuntime => "CAROM_KATA_RUNTIME",
            Self::Virtiofsd => return Place::Program(VIRTIOFSD),
            Self::StorageDaemon => return Place::Program(STORAGE_DAEMON),
            Self::QemuImg => return Place::Program(QEMU_IMG),
            Self::Systemd => return Place::Program(SYSTEMD),
            Self::Dmsetup => return Place::Program(DMSETUP),
            Self::FailingAllocations => return Place::Program(FAILING_ALLOCATIONS),
        })
    }

    /// Returns what is missing, or `None` if the requirement is met.
    #[must_use]
    pub fn lacking(self) -> Option<String> {
        self.lacking_of(|variable| env::var_os(variable).is_some(), |path| path.exists())
    }

    fn lacking_of(self, is_set: impl Fn(&str) -> bool, exists: impl Fn(&Path) -> bool) -> Option<String> {
        let variable = match self.place() {
            Place::Variable(variable) => variable,
            Place::Program(program) => return (!exists(Path::new(program))).then(|| format!("needs {program}")),
        };
        if !is_set(variable) {
            let what = match self {
                Self::Distribution
                | Self::Firmware
                | Self::Package
                | Self::KernelPackages
                | Self::TracePoints
                | Self::NewerTracePoints => "the files that",
                _ => "the device or directory that",
            };
            return Some(format!("needs {what} {variable} names"));
        }
        let injects = self != Self::ErrorInjection || exists(Path::new(AER_INJECT));
        (!injects).then(|| format!("needs {AER_INJECT}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_is_missing_if_no_variable_names_it() {
        assert_eq!(Need::Usb.lacking_of(|name| name == "CAROM_USB", |_| false), None);
        let lacking = |need: Need| need.lacking_of(|name| name == "CAROM_EDU", |_| true);
        assert_eq!(lacking(Need::Usb).as_deref(), Some("needs the device or directory that CAROM_USB names"));
        assert_eq!(lacking(Need::Distribution).as_deref(), Some("needs the files that CAROM_DISTRIBUTION names"));
    }

    #[test]
    fn errors_need_the_kernels_module_too() {
        assert_eq!(Need::ErrorInjection.lacking_of(|_| true, |_| true), None);
        let lacking = Need::ErrorInjection.lacking_of(|_| true, |_| false);
        assert_eq!(lacking.as_deref(), Some("needs /dev/aer_inject"));
    }

    #[test]
    fn program_is_missing_if_its_file_is_missing() {
        assert_eq!(Need::QemuImg.lacking_of(|_| false, |path| path == Path::new(QEMU_IMG)), None);
        let lacking = Need::Virtiofsd.lacking_of(|_| true, |_| false);
        assert_eq!(lacking.as_deref(), Some("needs /usr/lib/qemu/virtiofsd"));
    }
}

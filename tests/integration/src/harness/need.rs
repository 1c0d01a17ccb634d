// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a test cannot do without.

use std::env;
use std::path::Path;

/// By its character device the kernel's module `aer_inject` takes errors that a device is to have.
const AER_INJECT: &str = "/dev/aer_inject";

/// Where Debian 12's `qemu-system-common` has its virtiofsd.
pub const VIRTIOFSD: &str = "/usr/lib/qemu/virtiofsd";

/// QEMU's storage daemon, of the same package.
pub const STORAGE_DAEMON: &str = "/usr/bin/qemu-storage-daemon";

/// QEMU's program for images, of Debian's `qemu-utils`.
pub const QEMU_IMG: &str = "/usr/bin/qemu-img";

/// The program that makes devices of the kernel's device mapper, of Debian's `dmsetup`.
pub const DMSETUP: &str = "/usr/sbin/dmsetup";

/// The service manager, of Debian's `systemd`.
pub const SYSTEMD: &str = "/lib/systemd/systemd";

/// Where a kernel that has allocations fail when asked has the settings of the slab allocator's (`CONFIG_FAILSLAB`).
pub const FAILING_ALLOCATIONS: &str = "/sys/kernel/debug/failslab";

/// How a test finds what it needs.
enum Place {
    /// A variable names it.
    Variable(&'static str),
    /// A program of a Debian package, or what a kernel has that was built so.
    Program(&'static str),
}

/// Devices, programs and services of the host that the rig has and another host may lack. See [`crate::Site`] for the devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// QEMU's edu device.
    Edu,
    /// Another one.
    Edu2,
    /// One that has 28 address bits.
    EduNarrow,
    /// A second NVMe drive.
    SecondDrive,
    /// A second NVMe drive on which reads fail at a known place.
    FailingDrive,
    /// A network card with a server that echoes.
    Net,
    /// A device below a root port, and the module `aer_inject` to make errors of it.
    ErrorInjection,
    /// A USB controller with a drive.
    Usb,
    /// A network card of igb's with a server that echoes.
    Igb,
    /// An AHCI controller with a drive.
    Ahci,
    /// A device of vfio-pci whose group has a device of another driver.
    NotViable,
    /// A Debian made of packages.
    Distribution,
    /// Firmware, and a disk that it boots.
    Firmware,
    /// Carom as a Debian package.
    Package,
    /// A kernel for guests that has trace points.
    TracePoints,
    /// The same of the newer series.
    NewerTracePoints,
    /// A server of directories of the host.
    Virtiofsd,
    /// A server of disks.
    StorageDaemon,
    /// The program that makes and checks qcow2 images.
    QemuImg,
    /// A block device to which the host may swap.
    Swap,
    /// A directory with the programs of Kata Containers' runtime, which is built by hand.
    KataRuntime,
    /// The program that makes devices of the kernel's device mapper.
    Dmsetup,
    /// A service manager that can be started in namespaces.
    Systemd,
    /// A kernel whose allocations fail when a test asks for it: that of the rig with IOMMUFD.
    FailingAllocations,
}

impl Need {
    /// What must be there for it.
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

    /// What is not there, if it is not.
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
                Self::Distribution | Self::Firmware | Self::Package | Self::TracePoints | Self::NewerTracePoints => {
                    "what"
                }
                _ => "a device that",
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
    fn device_is_lacking_where_no_variable_names_it() {
        assert_eq!(Need::Usb.lacking_of(|name| name == "CAROM_USB", |_| false), None);
        let lacking = |need: Need| need.lacking_of(|name| name == "CAROM_EDU", |_| true);
        assert_eq!(lacking(Need::Usb).as_deref(), Some("needs a device that CAROM_USB names"));
        assert_eq!(lacking(Need::Distribution).as_deref(), Some("needs what CAROM_DISTRIBUTION names"));
    }

    #[test]
    fn errors_need_the_kernels_module_too() {
        assert_eq!(Need::ErrorInjection.lacking_of(|_| true, |_| true), None);
        let lacking = Need::ErrorInjection.lacking_of(|_| true, |_| false);
        assert_eq!(lacking.as_deref(), Some("needs /dev/aer_inject"));
    }

    #[test]
    fn program_is_lacking_where_its_file_is_not() {
        assert_eq!(Need::QemuImg.lacking_of(|_| false, |path| path == Path::new(QEMU_IMG)), None);
        let lacking = Need::Virtiofsd.lacking_of(|_| true, |_| false);
        assert_eq!(lacking.as_deref(), Some("needs /usr/lib/qemu/virtiofsd"));
    }
}

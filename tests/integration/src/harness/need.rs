// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a test cannot do without.

use std::env;
use std::path::Path;

/// By its character device the kernel's module `aer_inject` takes errors that a device is to have.
const AER_INJECT: &str = "/dev/aer_inject";

/// Devices and services of the host that the rig has and another host may lack. See [`crate::Site`] for the devices.
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
    /// A device of vfio-pci whose group has a device of another driver.
    NotViable,
}

impl Need {
    /// The variable that names it.
    fn variable(self) -> &'static str {
        match self {
            Self::Edu => "CAROM_EDU",
            Self::Edu2 => "CAROM_EDU2",
            Self::EduNarrow => "CAROM_EDU_NARROW",
            Self::SecondDrive => "CAROM_NVME2",
            Self::FailingDrive => "CAROM_NVME2_BAD",
            Self::Net => "CAROM_NET",
            Self::ErrorInjection => "CAROM_AER",
            Self::Usb => "CAROM_USB",
            Self::NotViable => "CAROM_NOT_VIABLE",
        }
    }

    /// What is not there, if it is not.
    #[must_use]
    pub fn lacking(self) -> Option<String> {
        self.lacking_of(|variable| env::var_os(variable).is_some(), |path| path.exists())
    }

    fn lacking_of(self, is_set: impl Fn(&str) -> bool, exists: impl Fn(&Path) -> bool) -> Option<String> {
        let variable = self.variable();
        if !is_set(variable) {
            return Some(format!("needs a device that {variable} names"));
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
        let lacking = Need::Usb.lacking_of(|name| name == "CAROM_EDU", |_| true);
        assert_eq!(lacking.as_deref(), Some("needs a device that CAROM_USB names"));
    }

    #[test]
    fn errors_need_the_kernels_module_too() {
        assert_eq!(Need::ErrorInjection.lacking_of(|_| true, |_| true), None);
        let lacking = Need::ErrorInjection.lacking_of(|_| true, |_| false);
        assert_eq!(lacking.as_deref(), Some("needs /dev/aer_inject"));
    }
}

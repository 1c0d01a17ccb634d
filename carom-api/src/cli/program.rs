// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The name under which the program was started.

use std::ffi::OsStr;
use std::path::Path;

/// Release of Cloud Hypervisor whose API Carom implements.
const API_VERSION: &str = "53.0.0";
/// The same release, as Cloud Hypervisor's own builds print it.
const API_BUILD: &str = "v53.0";

/// Program name that Carom was started with. Clients of Cloud Hypervisor look for the name `cloud-hypervisor`. The version tells them which
/// requests they may send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Program {
    /// Any name except `cloud-hypervisor`.
    #[default]
    Carom,
    /// `cloud-hypervisor`, usually the name of a link to Carom. Carom then reports Cloud Hypervisor's version, and the consoles have Cloud
    /// Hypervisor's defaults. All other behaviour is the same.
    CloudHypervisor,
}

impl Program {
    /// Returns the program name for `path`, the path that Carom was started with.
    pub fn of(path: &OsStr) -> Self {
        let is_other = Path::new(path).file_name() == Some(OsStr::new(Self::CloudHypervisor.name()));
        if is_other { Self::CloudHypervisor } else { Self::Carom }
    }

    /// Name of the program.
    pub fn name(self) -> &'static str {
        match self {
            Self::Carom => "carom",
            Self::CloudHypervisor => "cloud-hypervisor",
        }
    }

    /// Version number.
    pub fn version(self) -> &'static str {
        match self {
            Self::Carom => env!("CARGO_PKG_VERSION"),
            Self::CloudHypervisor => API_VERSION,
        }
    }

    /// Version as `--version` prints it after the name.
    pub fn printed_version(self) -> &'static str {
        match self {
            Self::Carom => env!("CARGO_PKG_VERSION"),
            Self::CloudHypervisor => API_BUILD,
        }
    }

    /// Build version that `vmm.ping` reports.
    pub fn build_version(self) -> &'static str {
        match self {
            Self::Carom => concat!("carom ", env!("CARGO_PKG_VERSION")),
            Self::CloudHypervisor => API_BUILD,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_is_chosen_by_the_file_name_alone() {
        for (path, program) in [
            ("cloud-hypervisor", Program::CloudHypervisor),
            ("/usr/bin/cloud-hypervisor", Program::CloudHypervisor),
            ("/opt/cloud-hypervisor/carom", Program::Carom),
            ("cloud-hypervisor-static", Program::Carom),
            ("", Program::Carom),
        ] {
            assert_eq!(Program::of(OsStr::new(path)), program, "{path}");
        }
    }
}

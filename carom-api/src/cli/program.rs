// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Name under which the program was started, and the versions that the program reports under this name.

use std::ffi::OsStr;
use std::path::Path;

/// Release of Cloud Hypervisor whose API Carom implements.
const API_VERSION: &str = "53.0.0";
/// The release [`API_VERSION`], in the notation of Cloud Hypervisor's own builds.
const API_BUILD: &str = "v53.0";

/// Name under which the program was started. Clients of Cloud Hypervisor start a program named `cloud-hypervisor`. These clients use the
/// program's version to decide which requests to send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Program {
    /// Any name except `cloud-hypervisor`.
    #[default]
    Carom,
    /// `cloud-hypervisor`, usually the name of a link to Carom. Carom then reports Cloud Hypervisor's version, and the consoles have Cloud
    /// Hypervisor's defaults. The name changes nothing else.
    CloudHypervisor,
}

impl Program {
    /// Returns the name in `path`, the first word of the command line.
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

    /// Version that `--version` prints after the name.
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

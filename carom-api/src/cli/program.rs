// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The name under which the program was started.

use std::ffi::OsStr;
use std::path::Path;

/// The release of Cloud Hypervisor whose API is implemented.
const API_VERSION: &str = "53.0.0";
/// The same as that release's builds have it.
const API_BUILD: &str = "v53.0";

/// What the program was started as. Clients of Cloud Hypervisor look for its name, and learn by its version what they may ask for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Program {
    /// Any name but the other.
    #[default]
    Carom,
    /// `cloud-hypervisor`, by a link. Versions are those of the API, and the defaults of the consoles are as there; all else is
    /// the same.
    CloudHypervisor,
}

impl Program {
    /// What a program is that was started by this path.
    pub fn of(path: &OsStr) -> Self {
        let is_other = Path::new(path).file_name() == Some(OsStr::new(Self::CloudHypervisor.name()));
        if is_other { Self::CloudHypervisor } else { Self::Carom }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Carom => "carom",
            Self::CloudHypervisor => "cloud-hypervisor",
        }
    }

    /// Its version in numbers.
    pub fn version(self) -> &'static str {
        match self {
            Self::Carom => env!("CARGO_PKG_VERSION"),
            Self::CloudHypervisor => API_VERSION,
        }
    }

    /// Its version as `--version` prints it after the name.
    pub fn printed_version(self) -> &'static str {
        match self {
            Self::Carom => env!("CARGO_PKG_VERSION"),
            Self::CloudHypervisor => API_BUILD,
        }
    }

    /// What `vmm.ping` calls the build.
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
    fn name_of_the_file_alone_tells_what_it_is() {
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

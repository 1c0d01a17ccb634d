// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `--seccomp`.

use crate::error::{ConfigError, one_line};
use crate::field::Field;

/// Action for a system call that the filter of a thread does not allow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Seccomp {
    /// The kernel ends the program.
    #[default]
    True,
    /// The call succeeds: nothing is filtered.
    False,
    /// The call succeeds, and the kernel logs it.
    Log,
    /// The call fails with an error.
    Errno,
}

impl Seccomp {
    /// The option.
    pub const OPTION: Field = Field::only("--seccomp");
}

impl std::str::FromStr for Seccomp {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        match text {
            "true" => Ok(Self::True),
            "false" => Ok(Self::False),
            "log" => Ok(Self::Log),
            "errno" => Ok(Self::Errno),
            _ => Err(ConfigError::new(
                Self::OPTION,
                format!("'{}' is not one of true, false, log, errno", one_line(text)),
            )),
        }
    }
}

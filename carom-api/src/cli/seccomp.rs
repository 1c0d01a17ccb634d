// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Option `--seccomp`, which selects the action for forbidden system calls.

use crate::error::{ConfigError, one_line};
use crate::field::Field;

/// Action for a system call that a thread's seccomp filter does not allow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Seccomp {
    /// The host kernel ends the program.
    #[default]
    True,
    /// All system calls are allowed, because threads have no filter.
    False,
    /// The host kernel executes and logs the call.
    Log,
    /// The call fails with `EPERM`.
    Errno,
}

impl Seccomp {
    /// Name of the option.
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

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! `--seccomp`.

use crate::error::{ConfigError, one_line};
use crate::field::Field;

/// What becomes of a system call that a thread has no need of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Seccomp {
    /// It ends the program.
    #[default]
    True,
    /// It is made: nothing is filtered.
    False,
    /// It is made, and the kernel's log tells of it.
    Log,
    /// It fails.
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
            _ => {
                Err(ConfigError::new(Self::OPTION, format!("'{}' is none of true, false, log, errno", one_line(text))))
            }
        }
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Option `--inherit`, which passes open files to the VMM.

use crate::error::{ConfigError, one_line};
use crate::field::Field;

/// File descriptor that the parent process left open. The VMM uses this descriptor instead of opening the same file again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InheritedFd(pub i32);

impl InheritedFd {
    /// Name of the option.
    pub const OPTION: Field = Field::only("--inherit");
}

impl std::str::FromStr for InheritedFd {
    type Err = ConfigError;

    /// Parses `fd=NUMBER`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let Some(number) = text.strip_prefix("fd=") else {
            return Err(ConfigError::new(Self::OPTION, format!("'{}' is not fd=NUMBER", one_line(text))));
        };
        let rule = || format!("'{}' is not a descriptor number above 2", one_line(number));
        let number = number.parse().ok().filter(|number| *number > 2);
        number.map(Self).ok_or_else(|| ConfigError::new(Self::OPTION.key("fd"), rule()))
    }
}

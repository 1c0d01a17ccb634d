// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Where a console goes.

use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ConfigError;
use crate::field::Field;

/// Where a console goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum ConsoleMode {
    /// There is none.
    Off,
    /// What the guest writes is dropped.
    Null,
    /// Standard input and output.
    Tty,
    /// A file.
    File,
}

/// A console.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConsoleConfig {
    /// Where it goes.
    pub mode: ConsoleMode,
    /// The file of [`ConsoleMode::File`].
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub file: Option<PathBuf>,
}

impl ConsoleConfig {
    /// The option of the first serial port.
    pub const SERIAL: Field = Field::new("--serial", "serial");
    /// [`Self::file`] of the first serial port.
    pub const SERIAL_FILE: Field = Self::SERIAL.key("file");

    /// Checks that there is a file where there must be one.
    ///
    /// # Errors
    /// There is none.
    pub fn check(&self) -> Result<(), ConfigError> {
        if self.mode == ConsoleMode::File && self.file.is_none() {
            return Err(ConfigError::new(Self::SERIAL_FILE, "is needed with mode File"));
        }
        Ok(())
    }
}

impl Default for ConsoleConfig {
    /// What a VM gets that says nothing of its console.
    fn default() -> Self {
        Self { mode: ConsoleMode::Null, file: None }
    }
}

impl FromStr for ConsoleConfig {
    type Err = ConfigError;

    /// Parses `off`, `null`, `tty` or `file=PATH`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let plain = |mode| Ok(Self { mode, file: None });
        match text {
            "off" => plain(ConsoleMode::Off),
            "null" => plain(ConsoleMode::Null),
            "tty" => plain(ConsoleMode::Tty),
            _ => match text.strip_prefix("file=") {
                Some(path) if !path.is_empty() => Ok(Self { mode: ConsoleMode::File, file: Some(path.into()) }),
                _ => Err(ConfigError::new(Self::SERIAL, format!("'{text}' is none of off, null, tty, file=PATH"))),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mode_and_file_are_read() {
        let serial: ConsoleConfig = "file=/tmp/log".parse().unwrap();
        assert_eq!((serial.mode, serial.file), (ConsoleMode::File, Some("/tmp/log".into())));
        let error = "pty".parse::<ConsoleConfig>().unwrap_err().to_string();
        assert_eq!(error, "--serial: 'pty' is none of off, null, tty, file=PATH");
    }

    #[test]
    fn mode_that_needs_a_file_is_refused_without_one() {
        let serial = ConsoleConfig { mode: ConsoleMode::File, file: None };
        assert_eq!(serial.check().unwrap_err().field, ConsoleConfig::SERIAL_FILE);
    }
}

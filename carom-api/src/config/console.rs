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
    /// A pseudoterminal. Where it is, `vm.info` says in `file`.
    Pty,
    /// A unix socket; the client that came last is served.
    Socket,
}

/// A console.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ConsoleConfig {
    /// Where it goes.
    pub mode: ConsoleMode,
    /// The file of [`ConsoleMode::File`]; in answers, also the path of the pseudoterminal of [`ConsoleMode::Pty`].
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub file: Option<PathBuf>,
    /// The socket of [`ConsoleMode::Socket`].
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub socket: Option<PathBuf>,
}

impl ConsoleConfig {
    /// The option of the first serial port.
    pub const SERIAL: Field = Field::new("--serial", "serial");
    /// [`Self::file`] of the first serial port.
    pub const SERIAL_FILE: Field = Self::SERIAL.key("file");

    /// [`Self::socket`] of the first serial port.
    pub const SERIAL_SOCKET: Field = Self::SERIAL.key("socket");

    /// This mode, with no file and no socket.
    pub const fn of(mode: ConsoleMode) -> Self {
        Self { mode, file: None, socket: None }
    }

    /// Checks that there is a file or a socket where there must be one.
    ///
    /// # Errors
    /// There is none, or a socket that nothing would use.
    pub fn check(&self) -> Result<(), ConfigError> {
        if self.mode == ConsoleMode::Socket && self.socket.is_none() {
            return Err(ConfigError::new(Self::SERIAL_SOCKET, "is needed with mode Socket"));
        }
        if self.mode != ConsoleMode::Socket && self.socket.is_some() {
            return Err(ConfigError::new(Self::SERIAL_SOCKET, "is used with mode Socket only"));
        }
        if self.mode == ConsoleMode::File && self.file.is_none() {
            return Err(ConfigError::new(Self::SERIAL_FILE, "is needed with mode File"));
        }
        Ok(())
    }
}

impl Default for ConsoleConfig {
    /// What a VM gets that says nothing of its console.
    fn default() -> Self {
        Self::of(ConsoleMode::Null)
    }
}

impl FromStr for ConsoleConfig {
    type Err = ConfigError;

    /// Parses `off`, `null`, `tty`, `pty`, `file=PATH` or `socket=PATH`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        match (text, text.split_once('=')) {
            ("off", _) => Ok(Self::of(ConsoleMode::Off)),
            ("null", _) => Ok(Self::of(ConsoleMode::Null)),
            ("tty", _) => Ok(Self::of(ConsoleMode::Tty)),
            ("pty", _) => Ok(Self::of(ConsoleMode::Pty)),
            (_, Some(("file", path))) if !path.is_empty() => {
                Ok(Self { file: Some(path.into()), ..Self::of(ConsoleMode::File) })
            }
            (_, Some(("socket", path))) if !path.is_empty() => {
                Ok(Self { socket: Some(path.into()), ..Self::of(ConsoleMode::Socket) })
            }
            _ => {
                let rule = format!("'{text}' is none of off, null, tty, pty, file=PATH, socket=PATH");
                Err(ConfigError::new(Self::SERIAL, rule))
            }
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
        let serial: ConsoleConfig = "socket=/s".parse().unwrap();
        assert_eq!((serial.mode, serial.socket), (ConsoleMode::Socket, Some("/s".into())));
        assert_eq!("pty".parse(), Ok(ConsoleConfig::of(ConsoleMode::Pty)));
        for wrong in ["pipe", "pty=/p", "socket=", "socket"] {
            let error = wrong.parse::<ConsoleConfig>().unwrap_err().to_string();
            assert_eq!(error, format!("--serial: '{wrong}' is none of off, null, tty, pty, file=PATH, socket=PATH"));
        }
    }

    #[test]
    fn mode_that_needs_a_file_is_refused_without_one() {
        assert_eq!(ConsoleConfig::of(ConsoleMode::File).check().unwrap_err().field, ConsoleConfig::SERIAL_FILE);
        assert_eq!(ConsoleConfig::of(ConsoleMode::Socket).check().unwrap_err().field, ConsoleConfig::SERIAL_SOCKET);
        let stray = ConsoleConfig { socket: Some("/s".into()), ..ConsoleConfig::of(ConsoleMode::Pty) };
        assert_eq!(stray.check().unwrap_err().field, ConsoleConfig::SERIAL_SOCKET);
        assert_eq!(ConsoleConfig::of(ConsoleMode::Pty).check(), Ok(()));
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Backends of the guest's consoles, and the configuration of the first serial port.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::{ConfigError, ensure};
use crate::field::Field;
use crate::option_list::{OptionList, Special};

/// Backend of a console. With `Off`, the guest has no such console. `Null` drops the guest's output. The other modes connect the console to
/// standard input and output (`Tty`), a file (`File`), a pseudoterminal (`Pty`), or a unix socket (`Socket`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum ConsoleMode {
    /// The guest has no such console.
    Off,
    /// The guest's output is dropped.
    Null,
    /// Standard input and output.
    Tty,
    /// A file.
    File,
    /// A pseudoterminal. `vm.info` reports its path in `file`.
    Pty,
    /// A unix socket. Only the client that connected last is served.
    Socket,
}

/// Backend of a serial port or paravirtual console.
#[derive(Clone, Copy, Debug)]
pub struct ConsoleTarget<'c> {
    /// Option that configures the console.
    pub option: Field,
    /// Kind of backend.
    pub mode: ConsoleMode,
    /// Path of the file for [`ConsoleMode::File`].
    pub file: Option<&'c Path>,
    /// Path of the socket for [`ConsoleMode::Socket`].
    pub socket: Option<&'c Path>,
}

impl ConsoleTarget<'_> {
    /// Returns the configuration field of [`Self::file`].
    pub fn file_field(&self) -> Field {
        self.option.key("file")
    }

    /// Returns the configuration field of [`Self::socket`].
    pub fn socket_field(&self) -> Field {
        self.option.key("socket")
    }

    /// Checks that mode File has a file, and that only mode Socket has a socket.
    ///
    /// # Errors
    /// A file or socket is missing, or a socket is given for another mode.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let (is_socket, is_file) = (self.mode == ConsoleMode::Socket, self.mode == ConsoleMode::File);
        ensure(!is_socket || self.socket.is_some(), self.socket_field(), || "is required with mode Socket")?;
        ensure(is_socket || self.socket.is_none(), self.socket_field(), || "is only valid with mode Socket")?;
        ensure(!is_file || self.file.is_some(), self.file_field(), || "is required with mode File")
    }
}

impl ConsoleMode {
    /// Modes that a word selects on the command line. Keys with a path, such as `file=PATH`, select the other modes.
    pub(crate) const WORDS: &'static [&'static str] = &["off", "null", "tty", "pty"];
    /// The option has no key for the field `mode`, because [`Self::set`] sets the field.
    pub(crate) const KEYS: Special = Special::By("mode", &[]);

    /// Sets `mode` in `list` to the mode that `option` selects: `off`, `null`, `tty`, `pty`, `file=PATH` or `socket=PATH`. `text` is the
    /// value of `option`.
    ///
    /// # Errors
    /// The value selects no mode, or more than one mode.
    pub(crate) fn set(option: Field, list: &mut OptionList, text: &str) -> Result<(), ConfigError> {
        let words = Self::WORDS.iter().filter(|word| list.has(word));
        let keys = ["file", "socket"].iter().filter(|key| list.get(key).is_some());
        let modes: Vec<&str> = words.chain(keys).copied().collect();
        let [mode] = modes[..] else {
            let rule = format!("'{text}' must name exactly one of off, null, tty, pty, file=PATH, socket=PATH");
            return Err(ConfigError::new(option, rule));
        };
        list.set("mode", mode.into());
        Ok(())
    }
}

/// Implements the methods that all console configurations share: access to the backend, and parsing of the option.
macro_rules! console_option {
    ($config:ident) => {
        impl $config {
            /// Returns the console's backend.
            pub fn target(&self) -> $crate::config::ConsoleTarget<'_> {
                let Self { mode, file, socket, .. } = self;
                let (file, socket) = (file.as_deref(), socket.as_deref());
                $crate::config::ConsoleTarget { option: Self::OPTION, mode: *mode, file, socket }
            }
        }

        impl $crate::option_list::FromOption for $config {
            const OPTION: Field = Self::OPTION;
            const WORDS: &'static [&'static str] = ConsoleMode::WORDS;
            const SPECIAL: &'static [$crate::option_list::Special] = &[ConsoleMode::KEYS];

            fn prepare(list: &mut $crate::option_list::OptionList, text: &str) -> Result<(), ConfigError> {
                ConsoleMode::set(Self::OPTION, list, text)
            }
        }
        $crate::option_list::from_str!($config);
    };
}
pub(crate) use console_option;

/// The first serial port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SerialConfig {
    /// Backend of the port.
    pub mode: ConsoleMode,
    /// Path of the file for mode `File`. With mode `Pty`, `vm.info` reports the path of the pseudoterminal in this field.
    #[schema(value_type = Option<String>)]
    pub file: Option<PathBuf>,
    /// Path of the unix socket for mode `Socket`.
    #[schema(value_type = Option<String>)]
    pub socket: Option<PathBuf>,
}

impl SerialConfig {
    /// Option and JSON field of this configuration.
    pub const OPTION: Field = Field::new("--serial", "serial");

    /// Returns a configuration with this mode, without a file or socket.
    pub const fn of(mode: ConsoleMode) -> Self {
        Self { mode, file: None, socket: None }
    }

    /// Checks that mode File has a file, and that only mode Socket has a socket.
    ///
    /// # Errors
    /// A file or socket is missing, or a socket is given for another mode.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.target().check()
    }
}

impl Default for SerialConfig {
    /// Returns the serial port of a VM whose configuration does not mention the port.
    fn default() -> Self {
        Self::of(ConsoleMode::Null)
    }
}

console_option!(SerialConfig);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mode_that_needs_a_file_is_refused_without_one() {
        let refused = |config: SerialConfig| config.check().unwrap_err().to_string();
        assert_eq!(refused(SerialConfig::of(ConsoleMode::File)), "--serial file: is required with mode File");
        assert_eq!(refused(SerialConfig::of(ConsoleMode::Socket)), "--serial socket: is required with mode Socket");
        let stray = SerialConfig { socket: Some("/s".into()), ..SerialConfig::of(ConsoleMode::Pty) };
        assert_eq!(refused(stray), "--serial socket: is only valid with mode Socket");
        assert_eq!(SerialConfig::of(ConsoleMode::Pty).check(), Ok(()));
    }
}

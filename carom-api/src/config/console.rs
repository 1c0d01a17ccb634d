// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Where a console goes, and the guest's first serial port, which is one.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::{ConfigError, ensure};
use crate::field::Field;
use crate::option_list::{OptionList, Special};

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

/// Where a console of any kind goes.
#[derive(Clone, Copy, Debug)]
pub struct ConsoleTarget<'c> {
    /// The option that says so.
    pub option: Field,
    /// Where.
    pub mode: ConsoleMode,
    /// The file of [`ConsoleMode::File`].
    pub file: Option<&'c Path>,
    /// The socket of [`ConsoleMode::Socket`].
    pub socket: Option<&'c Path>,
}

impl ConsoleTarget<'_> {
    /// The field of [`Self::file`].
    pub fn file_field(&self) -> Field {
        self.option.key("file")
    }

    /// The field of [`Self::socket`].
    pub fn socket_field(&self) -> Field {
        self.option.key("socket")
    }

    /// Checks that there is a file or a socket where there must be one.
    ///
    /// # Errors
    /// There is none, or a socket that nothing would use.
    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let (is_socket, is_file) = (self.mode == ConsoleMode::Socket, self.mode == ConsoleMode::File);
        ensure(!is_socket || self.socket.is_some(), self.socket_field(), || "is needed with mode Socket")?;
        ensure(is_socket || self.socket.is_none(), self.socket_field(), || "is used with mode Socket only")?;
        ensure(!is_file || self.file.is_some(), self.file_field(), || "is needed with mode File")
    }
}

impl ConsoleMode {
    /// The modes that are words on the command line. The others are keys, which name a path.
    pub(crate) const WORDS: &'static [&'static str] = &["off", "null", "tty", "pty"];
    /// The mode has no key of its own.
    pub(crate) const KEYS: Special = Special::By("mode", &[]);

    /// Sets the mode of `option`, which is given as `off`, `null`, `tty`, `pty`, `file=PATH` or `socket=PATH`.
    ///
    /// # Errors
    /// The option has none of these, or several.
    pub(crate) fn set(option: Field, list: &mut OptionList, text: &str) -> Result<(), ConfigError> {
        let words = Self::WORDS.iter().filter(|word| list.has(word));
        let keys = ["file", "socket"].iter().filter(|key| list.get(key).is_some());
        let modes: Vec<&str> = words.chain(keys).copied().collect();
        let [mode] = modes[..] else {
            let rule = format!("'{text}' has not one of off, null, tty, pty, file=PATH, socket=PATH");
            return Err(ConfigError::new(option, rule));
        };
        list.set("mode", mode.into());
        Ok(())
    }
}

/// Implements the common part of a console: its target, and its option.
macro_rules! console_option {
    ($config:ident) => {
        impl $config {
            /// Where it goes.
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
    /// Where it goes.
    pub mode: ConsoleMode,
    /// The file of [`ConsoleMode::File`]; in answers, also the path of the pseudoterminal of [`ConsoleMode::Pty`].
    #[schema(value_type = Option<String>)]
    pub file: Option<PathBuf>,
    /// The socket of [`ConsoleMode::Socket`].
    #[schema(value_type = Option<String>)]
    pub socket: Option<PathBuf>,
}

impl SerialConfig {
    /// The option.
    pub const OPTION: Field = Field::new("--serial", "serial");

    /// This mode, with no file and no socket.
    pub const fn of(mode: ConsoleMode) -> Self {
        Self { mode, file: None, socket: None }
    }

    /// Checks that there is a file or a socket where there must be one.
    ///
    /// # Errors
    /// There is none, or a socket that nothing would use.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.target().check()
    }
}

impl Default for SerialConfig {
    /// What a VM gets that says nothing of its serial port.
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
        assert_eq!(refused(SerialConfig::of(ConsoleMode::File)), "--serial file: is needed with mode File");
        assert_eq!(refused(SerialConfig::of(ConsoleMode::Socket)), "--serial socket: is needed with mode Socket");
        let stray = SerialConfig { socket: Some("/s".into()), ..SerialConfig::of(ConsoleMode::Pty) };
        assert_eq!(refused(stray), "--serial socket: is used with mode Socket only");
        assert_eq!(SerialConfig::of(ConsoleMode::Pty).check(), Ok(()));
    }
}

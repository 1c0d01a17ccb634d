// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Where a console goes, and the guest's first serial port, which is one.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ConfigError;
use crate::field::Field;
use crate::option_list::OptionList;

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
        if self.mode == ConsoleMode::Socket && self.socket.is_none() {
            return Err(ConfigError::new(self.socket_field(), "is needed with mode Socket"));
        }
        if self.mode != ConsoleMode::Socket && self.socket.is_some() {
            return Err(ConfigError::new(self.socket_field(), "is used with mode Socket only"));
        }
        if self.mode == ConsoleMode::File && self.file.is_none() {
            return Err(ConfigError::new(self.file_field(), "is needed with mode File"));
        }
        Ok(())
    }
}

/// The target of a console as an option names it.
pub(crate) struct ReadTarget {
    pub(crate) mode: ConsoleMode,
    pub(crate) file: Option<PathBuf>,
    pub(crate) socket: Option<PathBuf>,
    /// The rest of the option.
    pub(crate) list: OptionList,
}

impl ReadTarget {
    /// The modes that are words on the command line.
    pub(crate) const WORDS: [(&'static str, ConsoleMode); 4] =
        [("off", ConsoleMode::Off), ("null", ConsoleMode::Null), ("tty", ConsoleMode::Tty), ("pty", ConsoleMode::Pty)];

    /// Parses `off`, `null`, `tty`, `pty`, `file=PATH` or `socket=PATH`, with any others of `keys`.
    ///
    /// # Errors
    /// The text has none of these, or several.
    pub(crate) fn parse(option: Field, text: &str, keys: &[&'static str]) -> Result<Self, ConfigError> {
        let words = Self::WORDS.map(|(word, _)| word);
        let list = OptionList::parse_with_words(option, text, &words, keys)?;
        let path = |key| list.get(key).map(PathBuf::from);
        let (file, socket) = (path("file"), path("socket"));
        let of_paths = [(&file, ConsoleMode::File), (&socket, ConsoleMode::Socket)];
        let of_paths = of_paths.into_iter().filter_map(|(path, mode)| path.as_ref().map(|_| mode));
        let of_words = Self::WORDS.into_iter().filter(|(word, _)| list.has(word)).map(|(_, mode)| mode);
        let modes: Vec<ConsoleMode> = of_words.chain(of_paths).collect();
        match modes[..] {
            [mode] => Ok(Self { mode, file, socket, list }),
            _ => {
                let rule = format!("'{text}' has not one of off, null, tty, pty, file=PATH, socket=PATH");
                Err(ConfigError::new(option, rule))
            }
        }
    }
}

/// The first serial port.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SerialConfig {
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

impl SerialConfig {
    /// The option.
    pub const OPTION: Field = Field::new("--serial", "serial");

    /// This mode, with no file and no socket.
    pub const fn of(mode: ConsoleMode) -> Self {
        Self { mode, file: None, socket: None }
    }

    /// Where it goes.
    pub fn target(&self) -> ConsoleTarget<'_> {
        ConsoleTarget {
            option: Self::OPTION,
            mode: self.mode,
            file: self.file.as_deref(),
            socket: self.socket.as_deref(),
        }
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

impl FromStr for SerialConfig {
    type Err = ConfigError;

    /// Parses `off`, `null`, `tty`, `pty`, `file=PATH` or `socket=PATH`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let ReadTarget { mode, file, socket, .. } = ReadTarget::parse(Self::OPTION, text, &["file", "socket"])?;
        Ok(Self { mode, file, socket })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mode_and_file_are_read() {
        let serial: SerialConfig = "file=/tmp/log".parse().unwrap();
        assert_eq!((serial.mode, serial.file), (ConsoleMode::File, Some("/tmp/log".into())));
        let serial: SerialConfig = "socket=/s".parse().unwrap();
        assert_eq!((serial.mode, serial.socket), (ConsoleMode::Socket, Some("/s".into())));
        assert_eq!("pty".parse(), Ok(SerialConfig::of(ConsoleMode::Pty)));
        let quoted: SerialConfig = "file=\"/a,b\"".parse().unwrap();
        assert_eq!(quoted.file, Some("/a,b".into()));
        for (wrong, rule) in [
            ("pipe", "'pipe' is neither key=value nor one of off, null, tty, pty"),
            ("socket", "'socket' is neither key=value nor one of off, null, tty, pty"),
            ("pty=/p", "unknown key 'pty', known are: file, socket"),
            ("socket=", "'socket=' has not one of off, null, tty, pty, file=PATH, socket=PATH"),
            ("pty,file=/f", "'pty,file=/f' has not one of off, null, tty, pty, file=PATH, socket=PATH"),
        ] {
            let error = wrong.parse::<SerialConfig>().unwrap_err().to_string();
            assert_eq!(error, format!("--serial: {rule}"));
        }
    }

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

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Connections of a console, made from its configuration.

use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;

use carom_api::Field;
use carom_api::config::{ConsoleMode, ConsoleTarget};

use super::{ConsoleOutput, Line, Names, Receiver, Terminal};
use crate::error::VmError;
use devices::counters::Counter;

/// Connections of a console. Dropping the connections waits for the readers of the guest's output.
#[derive(Default)]
pub struct ConsoleLinks {
    output: Option<ConsoleOutput>,
    terminal: Option<Terminal>,
    line: Option<Line>,
}

impl ConsoleLinks {
    /// Opens the connections of `target`. Opens nothing in the modes Off and Null.
    ///
    /// # Errors
    /// A file or socket cannot be opened, or the host has reached a limit.
    pub fn open(target: &ConsoleTarget<'_>, names: Names) -> Result<Self, VmError> {
        let fail = |source| VmError::Device { what: "set up a console", source };
        let (mut output, mut line) = (None, None);
        match target.mode {
            ConsoleMode::Off | ConsoleMode::Null => {}
            ConsoleMode::Tty => output = Some(ConsoleOutput::stdout(target.option).map_err(fail)?),
            ConsoleMode::File => {
                let file = |path: &Path| ConsoleOutput::file(target.option, path);
                output = Some(make_at(target.file_field(), target.file, file)?);
            }
            ConsoleMode::Pty => line = Some(Line::pty(names).map_err(fail)?),
            ConsoleMode::Socket => {
                let socket = |path: &Path| Line::socket(names, path);
                line = Some(make_at(target.socket_field(), target.socket, socket)?);
            }
        }
        Ok(Self { output, terminal: None, line })
    }

    /// Returns the writer of the console's output. A write never fails, and waits at most half a second.
    pub fn writer(&self) -> Box<dyn Write + Send> {
        let output = self.output.as_ref().map(ConsoleOutput::writer);
        output.or_else(|| self.line.as_ref().map(Line::writer)).unwrap_or_else(|| Box::new(io::sink()))
    }

    /// Connects input to `receiver`. If several consoles use standard input, the console that was connected last gets the input.
    ///
    /// # Errors
    /// The terminal cannot be set up.
    pub fn connect(&mut self, target: &ConsoleTarget<'_>, receiver: &Arc<dyn Receiver>) -> Result<(), VmError> {
        if let Some(line) = &self.line {
            line.connect(receiver);
        }
        if target.mode == ConsoleMode::Tty {
            let what = "connect the terminal to the guest";
            let terminal = Terminal::take(receiver.clone());
            self.terminal = Some(terminal.map_err(|source| VmError::Device { what, source })?);
        }
        Ok(())
    }

    /// True unless the guest's output is dropped, as in the modes Off and Null.
    pub fn has_output(&self) -> bool {
        self.output.is_some() || self.line.is_some()
    }

    /// Returns the number of lost bytes of the guest's output.
    fn lost_bytes(&self) -> u64 {
        let output = self.output.as_ref().map(ConsoleOutput::lost_bytes);
        output.or_else(|| self.line.as_ref().map(Line::lost_bytes)).unwrap_or(0)
    }

    /// Returns the counters of the connections.
    pub fn counters(&self) -> [Counter; 1] {
        let help = "Output of the guest that was lost: the host could not write it, or its reader was too slow.";
        [Counter { name: "lost_bytes", help, value: self.lost_bytes() }]
    }

    /// Returns the path of the pseudoterminal, if the console has one.
    pub fn pty_path(&self) -> Option<&Path> {
        self.line.as_ref()?.pty_path()
    }
}

/// Calls `make` with `path`, the value of `field`. Adds the field and the path to errors.
fn make_at<T>(field: Field, path: Option<&Path>, make: impl FnOnce(&Path) -> io::Result<T>) -> Result<T, VmError> {
    let path = path.unwrap_or(Path::new(""));
    make(path).map_err(VmError::of_file(field, path))
}

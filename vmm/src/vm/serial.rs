// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The serial port and what it is connected with.

use std::io;
use std::path::Path;
use std::sync::Arc;

use carom_api::Field;
use carom_api::config::{ConsoleConfig, ConsoleMode};
use carom_api::error::FileError;
use devices::legacy::serial::SerialPort;

use crate::address_space::IoMap;
use crate::arch::platform;
use crate::console::{Line, SerialOutput, Terminal};
use crate::kvm::KvmVm;
use crate::machine::VmError;

/// What the serial port is connected with. Dropping it waits for those who read what the guest has written.
#[derive(Default)]
pub(super) struct SerialLinks {
    _output: Option<SerialOutput>,
    _terminal: Option<Terminal>,
    line: Option<Line>,
}

impl SerialLinks {
    /// Adds the serial port, unless it is off, and connects it as `config` says.
    pub(super) fn add_port(
        config: &ConsoleConfig,
        kvm: &KvmVm,
        io_map: &IoMap,
    ) -> Result<(Option<Arc<SerialPort>>, Self), VmError> {
        let fail = |source| VmError::Device { what: "setting the serial port up", source };
        let (mut output, mut line) = (None, None);
        match config.mode {
            ConsoleMode::Off => return Ok((None, Self::default())),
            ConsoleMode::Null => {}
            ConsoleMode::Tty => output = Some(SerialOutput::stdout().map_err(fail)?),
            ConsoleMode::File => {
                output = Some(make_at(ConsoleConfig::SERIAL_FILE, config.file.as_deref(), SerialOutput::file)?);
            }
            ConsoleMode::Pty => line = Some(Line::pty().map_err(fail)?),
            ConsoleMode::Socket => {
                line = Some(make_at(ConsoleConfig::SERIAL_SOCKET, config.socket.as_deref(), Line::socket)?);
            }
        }
        let writer = output.as_ref().map(SerialOutput::writer).or_else(|| line.as_ref().map(Line::writer));
        let port = platform::add_serial_port(io_map, kvm, writer.unwrap_or_else(|| Box::new(io::sink())))?;
        if let Some(line) = &line {
            line.connect(&port);
        }
        let terminal = (config.mode == ConsoleMode::Tty).then(|| Terminal::take(port.clone())).transpose();
        let what = "giving the terminal to the guest";
        let terminal = terminal.map_err(|source| VmError::Device { what, source })?;
        Ok((Some(port), Self { _output: output, _terminal: terminal, line }))
    }

    /// The path of the pseudoterminal, if it is connected with one.
    pub(super) fn pty_path(&self) -> Option<&Path> {
        self.line.as_ref()?.pty_path()
    }
}

/// What `make` makes of the path that a field has.
fn make_at<T>(field: Field, path: Option<&Path>, make: impl FnOnce(&Path) -> io::Result<T>) -> Result<T, VmError> {
    let path = path.unwrap_or(Path::new(""));
    make(path).map_err(|source| FileError { field, path: path.display().to_string(), source }.into())
}

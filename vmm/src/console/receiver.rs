// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Guest's end of a console, and the console's names.

use std::io;
use std::os::fd::AsFd;

use devices::pc::serial::SerialPort;
use devices::virtio::console::{Size, VirtioConsole};
use rustix::termios::tcgetwinsize;

/// Names of a console.
#[derive(Clone, Copy, Debug)]
pub struct Names {
    /// Name in the log.
    pub shown: &'static str,
    /// Prefix of thread names.
    pub thread: &'static str,
}

/// Receiver of input for the guest.
pub trait Receiver: Send + Sync {
    /// Passes bytes to the guest. Returns the number of bytes that fitted into the guest's receive buffer.
    fn receive(&self, bytes: &[u8]) -> usize;

    /// True if the guest can receive the terminal's size.
    fn has_size(&self) -> bool {
        false
    }

    /// Reports the new size of the terminal.
    fn resize(&self, size: Size) {
        let _ = size;
    }
}

impl Receiver for SerialPort {
    fn receive(&self, bytes: &[u8]) -> usize {
        Self::receive(self, bytes)
    }
}

impl Receiver for VirtioConsole {
    fn receive(&self, bytes: &[u8]) -> usize {
        Self::receive(self, bytes)
    }

    fn has_size(&self) -> bool {
        true
    }

    fn resize(&self, size: Size) {
        Self::resize(self, size);
    }
}

/// Returns the size of a terminal.
///
/// # Errors
/// The file is not a terminal.
pub(super) fn size_of(terminal: impl AsFd) -> io::Result<Size> {
    let size = tcgetwinsize(terminal)?;
    Ok(Size { columns: size.ws_col, rows: size.ws_row })
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The guest's end of a console, and what that is called.

use std::io;
use std::os::fd::AsFd;

use devices::pc::serial::SerialPort;
use devices::virtio::console::{Size, VirtioConsole};
use rustix::termios::tcgetwinsize;

/// What a console is called.
#[derive(Clone, Copy, Debug)]
pub struct Names {
    /// In the log.
    pub shown: &'static str,
    /// In names of threads.
    pub thread: &'static str,
}

/// Who takes what is typed.
pub trait Receiver: Send + Sync {
    /// Gives the guest bytes to read; returns how many there was room for.
    fn receive(&self, bytes: &[u8]) -> usize;

    /// Whether the guest learns of the size of the terminal.
    fn has_size(&self) -> bool {
        false
    }

    /// The terminal has this size from now on.
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

/// The size of a terminal.
///
/// # Errors
/// It is none.
pub(super) fn size_of(terminal: impl AsFd) -> io::Result<Size> {
    let size = tcgetwinsize(terminal)?;
    Ok(Size { columns: size.ws_col, rows: size.ws_row })
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The user's terminal while the guest's console is on it.

use std::io::{self, IsTerminal, Read};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use devices::legacy::serial::SerialPort;
use rustix::termios::{OptionalActions, OutputModes, Termios, tcgetattr, tcsetattr};

/// The terminal's settings before raw mode, kept where the panic hook finds them too.
static ORIGINAL: Mutex<Option<Termios>> = Mutex::new(None);

/// How long input waits for room in the guest's receive buffer before it tries again.
const RETRY: Duration = Duration::from_millis(5);

/// Raw mode of standard input; dropping it restores what was before.
pub struct RawMode(());

impl RawMode {
    /// Sets raw mode, so that every key reaches the guest. `None` where standard input is no terminal.
    pub fn enter() -> io::Result<Option<Self>> {
        let stdin = io::stdin();
        if !stdin.is_terminal() {
            return Ok(None);
        }
        let original = tcgetattr(&stdin)?;
        let mut raw = original.clone();
        raw.make_raw();
        // The VMM's own messages are on the same terminal: a line feed of theirs still returns the carriage.
        raw.output_modes |= OutputModes::OPOST;
        *ORIGINAL.lock().unwrap_or_else(PoisonError::into_inner) = Some(original);
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            restore();
            hook(info);
        }));
        tcsetattr(&stdin, OptionalActions::Now, &raw)?;
        Ok(Some(Self(())))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        restore();
    }
}

/// Puts the terminal's settings back, once.
fn restore() {
    let original = ORIGINAL.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(original) = original {
        // Nothing can be done about a terminal that is gone.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &original);
    }
}

/// Starts a thread that hands standard input to the serial port until its end. The thread ends with the process: it
/// holds nothing that must be given back.
pub fn forward_input(port: Arc<SerialPort>) -> io::Result<()> {
    thread::Builder::new().name("serial-input".into()).spawn(move || {
        let mut buffer = [0; 256];
        let mut stdin = io::stdin().lock();
        loop {
            match stdin.read(&mut buffer) {
                Ok(0) => return,
                Ok(len) => send(&port, &buffer[..len]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    log::warn!("reading standard input: {error}");
                    return;
                }
            }
        }
    })?;
    Ok(())
}

fn send(port: &SerialPort, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        let taken = port.receive(bytes);
        bytes = &bytes[taken..];
        if taken == 0 {
            thread::sleep(RETRY);
        }
    }
}

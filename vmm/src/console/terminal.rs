// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The user's terminal while the guest's console is on it.

use std::io::{self, IsTerminal, Read};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::thread;
use std::time::Duration;

use devices::legacy::serial::SerialPort;
use devices::sandbox;
use rustix::termios::{OptionalActions, OutputModes, Termios, tcgetattr, tcsetattr};

use crate::thread_roles::SERIAL_INPUT;

/// The terminal's settings before raw mode, kept where the panic hook finds them too.
static ORIGINAL: Mutex<Option<Termios>> = Mutex::new(None);

/// What is typed goes here; one VM after the other may have the terminal.
static INPUT: Mutex<Input> = Mutex::new(Input { port: None, reader: false });

/// How long input waits for room in the guest's receive buffer before it tries again.
const RETRY: Duration = Duration::from_millis(5);

struct Input {
    port: Option<Arc<SerialPort>>,
    /// Whether the thread that reads standard input was started.
    reader: bool,
}

fn input() -> MutexGuard<'static, Input> {
    INPUT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Standard input in the hands of a guest, in raw mode if it is a terminal; dropping it gives it back as it was.
pub struct Terminal(());

impl Terminal {
    /// Gives standard input to `port`.
    pub fn take(port: Arc<SerialPort>) -> io::Result<Self> {
        // Made first, so that an error gives everything back.
        let terminal = Self(());
        enter_raw_mode()?;
        let mut input = input();
        input.port = Some(port);
        if !input.reader {
            // It ends with the process: it holds nothing that must be given back.
            sandbox::start(SERIAL_INPUT, "serial-input".into(), forward_input)?;
            input.reader = true;
        }
        drop(input);
        Ok(terminal)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        input().port = None;
        restore();
    }
}

/// Sets raw mode, so that every key reaches the guest, where standard input is a terminal.
fn enter_raw_mode() -> io::Result<()> {
    static HOOK: Once = Once::new();
    let stdin = io::stdin();
    if !stdin.is_terminal() {
        return Ok(());
    }
    let original = tcgetattr(&stdin)?;
    let mut raw = original.clone();
    raw.make_raw();
    // The VMM's own messages are on the same terminal: a line feed of theirs still returns the carriage.
    raw.output_modes |= OutputModes::OPOST;
    *ORIGINAL.lock().unwrap_or_else(PoisonError::into_inner) = Some(original);
    HOOK.call_once(|| {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            restore();
            hook(info);
        }));
    });
    tcsetattr(&stdin, OptionalActions::Now, &raw)?;
    Ok(())
}

/// Puts the terminal's settings back, once.
fn restore() {
    let original = ORIGINAL.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(original) = original {
        // Nothing can be done about a terminal that is gone.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &original);
    }
}

/// Hands standard input to whoever has it, until its end. What is typed while nobody has it is dropped.
fn forward_input() {
    let mut buffer = [0; 256];
    let mut stdin = io::stdin().lock();
    loop {
        match stdin.read(&mut buffer) {
            Ok(0) => return,
            Ok(len) => send(&buffer[..len]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                log::warn!("reading standard input: {error}");
                return;
            }
        }
    }
}

fn send(mut bytes: &[u8]) {
    while !bytes.is_empty() {
        // Looked up each time: the VM may end while its receive buffer is full.
        let Some(port) = input().port.clone() else { return };
        let taken = port.receive(bytes);
        drop(port);
        bytes = &bytes[taken..];
        if taken == 0 {
            thread::sleep(RETRY);
        }
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The user's terminal while a console of the guest is on it.

use std::io::{self, IsTerminal, Read};
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::thread;
use std::time::Duration;

use devices::sandbox;
use devices::virtio::console::Size;
use rustix::termios::{OptionalActions, OutputModes, Termios, tcgetattr, tcsetattr};
use vmm_sys_util::signal::{block_signal, unblock_signal};

use super::receiver::{Receiver, size_of};
use crate::process::thread_roles::STDIN;

/// The terminal's settings before raw mode, kept where the panic hook finds them too.
static ORIGINAL: Mutex<Option<Termios>> = Mutex::new(None);

/// What is typed goes here; one VM after the other may have the terminal.
static INPUT: Mutex<Input> = Mutex::new(Input { receivers: Vec::new(), next: 0, reader: false });

/// How long input waits for room in the guest's receive buffer before it tries again.
const RETRY: Duration = Duration::from_millis(5);

struct Input {
    /// Who has the terminal, by number. What is typed goes to the one that came last.
    receivers: Vec<(u64, Arc<dyn Receiver>)>,
    /// Number of the next one.
    next: u64,
    /// Whether the thread that reads standard input was started.
    reader: bool,
}

fn input() -> MutexGuard<'static, Input> {
    INPUT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Standard input in the hands of a guest, in raw mode if it is a terminal; dropping the last one gives it back as it was.
pub struct Terminal(u64);

impl Terminal {
    /// Gives standard input to `receiver`, which gets what is typed before those that had it, and tells it of the terminal's size.
    ///
    /// # Errors
    /// The terminal cannot be set up, or there can be no more threads.
    pub fn take(receiver: Arc<dyn Receiver>) -> io::Result<Self> {
        if let Some(size) = stdin_size() {
            receiver.resize(size);
        }
        let mut input = input();
        let number = input.next;
        input.next += 1;
        input.receivers.push((number, receiver));
        let (first, reader) = (input.receivers.len() == 1, input.reader);
        drop(input);
        // An error from here on gives everything back.
        let terminal = Self(number);
        if first {
            enter_raw_mode()?;
        }
        if !reader {
            // It ends with the process: it holds nothing that must be given back.
            sandbox::start(STDIN, "console-input".into(), forward_input)?;
            self::input().reader = true;
        }
        Ok(terminal)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let mut input = input();
        input.receivers.retain(|(number, _)| *number != self.0);
        if input.receivers.is_empty() {
            restore();
        }
    }
}

/// Tells those who have the terminal that its size may have changed.
pub fn tell_size() {
    let Some(size) = stdin_size() else { return };
    let receivers: Vec<Arc<dyn Receiver>> = input().receivers.iter().map(|(_, receiver)| receiver.clone()).collect();
    receivers.iter().for_each(|receiver| receiver.resize(size));
}

/// The size of the terminal that standard input is, if it is one.
fn stdin_size() -> Option<Size> {
    size_of(io::stdin()).ok()
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

/// Puts the terminal's settings back, once. Call it before the process ends in another way than by dropping each [`Terminal`].
pub fn restore() {
    let original = ORIGINAL.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(original) = original {
        // The kernel would stop a process in the background here.
        let blocked = block_signal(libc::SIGTTOU).is_ok();
        // Nothing can be done about a terminal that is gone.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &original);
        if blocked {
            // It fails for no signal that was blocked.
            let _ = unblock_signal(libc::SIGTTOU);
        }
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
        let Some((_, receiver)) = input().receivers.last().cloned() else { return };
        let taken = receiver.receive(bytes);
        drop(receiver);
        bytes = &bytes[taken..];
        if taken == 0 {
            thread::sleep(RETRY);
        }
    }
}

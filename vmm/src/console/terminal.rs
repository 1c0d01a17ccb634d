// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! The user's terminal while a guest's console uses it.

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

/// The terminal's settings before raw mode. The panic hook also uses them.
static ORIGINAL: Mutex<Option<Termios>> = Mutex::new(None);

/// Receivers of standard input. Successive VMs may use the terminal.
static INPUT: Mutex<Input> = Mutex::new(Input { receivers: Vec::new(), next: 0, reader: false });

/// Delay before input is offered again to a guest whose receive buffer was full.
const RETRY: Duration = Duration::from_millis(5);

struct Input {
    /// Receivers that use the terminal, with their numbers. The latest receiver gets the input.
    receivers: Vec<(u64, Arc<dyn Receiver>)>,
    /// Number of the next receiver.
    next: u64,
    /// True if the thread that reads standard input was started.
    reader: bool,
}

fn input() -> MutexGuard<'static, Input> {
    INPUT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Standard input while a guest uses it. If standard input is a terminal, it is in raw mode. Dropping the last `Terminal` restores the
/// terminal's settings.
pub struct Terminal(u64);

impl Terminal {
    /// Connects standard input to `receiver`, which takes precedence over earlier receivers. Reports the terminal's size to
    /// `receiver`.
    ///
    /// # Errors
    /// The terminal cannot be set up, or the process cannot start more threads.
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
        // If a later step fails, this value is dropped, and the drop undoes the earlier steps.
        let terminal = Self(number);
        if first {
            enter_raw_mode()?;
        }
        if !reader {
            // The thread runs until the process ends. It holds nothing that must be released.
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

/// Reports the terminal's size to the receivers, because it may have changed.
pub fn announce_size() {
    let Some(size) = stdin_size() else { return };
    let receivers: Vec<Arc<dyn Receiver>> = input().receivers.iter().map(|(_, receiver)| receiver.clone()).collect();
    receivers.iter().for_each(|receiver| receiver.resize(size));
}

/// Returns the size of the terminal on standard input, if standard input is a terminal.
fn stdin_size() -> Option<Size> {
    size_of(io::stdin()).ok()
}

/// Sets raw mode if standard input is a terminal, so that every key reaches the guest.
fn enter_raw_mode() -> io::Result<()> {
    static HOOK: Once = Once::new();
    let stdin = io::stdin();
    if !stdin.is_terminal() {
        return Ok(());
    }
    let original = tcgetattr(&stdin)?;
    let mut raw = original.clone();
    raw.make_raw();
    // The VMM writes its own messages to the same terminal. With OPOST, the line feeds in these messages still return the carriage.
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

/// Restores the terminal's settings, unless they are restored already. Must be called before the process ends if a [`Terminal`] still
/// exists.
pub fn restore() {
    let original = ORIGINAL.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(original) = original {
        // If SIGTTOU were not blocked, the kernel would stop a background process here.
        let blocked = block_signal(libc::SIGTTOU).is_ok();
        // The error is ignored, because the terminal may no longer exist.
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &original);
        if blocked {
            // Unblocking a blocked signal cannot fail.
            let _ = unblock_signal(libc::SIGTTOU);
        }
    }
}

/// Passes standard input to the current receiver, until the input ends. Without a receiver, input is dropped.
fn forward_input() {
    let mut buffer = [0; 256];
    let mut stdin = io::stdin().lock();
    loop {
        match stdin.read(&mut buffer) {
            Ok(0) => return,
            Ok(len) => send(&buffer[..len]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                log::warn!("cannot read standard input: {error}; the guest's console receives no more input");
                return;
            }
        }
    }
}

fn send(mut bytes: &[u8]) {
    while !bytes.is_empty() {
        // The receiver is looked up each time, because the VM may end while the guest's receive buffer is full.
        let Some((_, receiver)) = input().receivers.last().cloned() else { return };
        let taken = receiver.receive(bytes);
        drop(receiver);
        bytes = &bytes[taken..];
        if taken == 0 {
            thread::sleep(RETRY);
        }
    }
}

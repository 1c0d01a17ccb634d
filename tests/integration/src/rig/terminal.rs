// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Terminal of the command: connects the emulated machine's virtual console to this program's standard input and output.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetwinsize, tcsetattr};

/// Interval between attempts to connect, and between checks for a requested stop.
const POLL: Duration = Duration::from_millis(100);

/// This key (Ctrl-]), pressed [`PRESSES`] times within [`PRESS_TIME`], ends the machine.
const ESCAPE: u8 = 0x1d;
const PRESSES: usize = 3;
const PRESS_TIME: Duration = Duration::from_secs(1);

/// Connection of the user's terminal to the machine's console, until this value is dropped.
pub(super) struct Terminal {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Previous modes of the user's terminal.
    modes: Option<Termios>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    ended: AtomicBool,
}

impl Terminal {
    /// Forwards standard input to the console's socket, and the console's output to standard output. The user's terminal becomes
    /// raw, so that the command also receives keys such as Ctrl-C.
    pub(super) fn start(socket: &Path) -> Self {
        let shared = Arc::<Shared>::default();
        let stdin = io::stdin();
        let modes = isatty(&stdin).then(|| tcgetattr(&stdin).ok()).flatten();
        if let Some(mut raw) = modes.clone() {
            raw.make_raw();
            // If the terminal rejects raw mode, it stays unchanged.
            let _ = tcsetattr(&stdin, OptionalActions::Now, &raw);
        }
        let (path, own) = (PathBuf::from(socket), shared.clone());
        let thread = thread::spawn(move || hand_on(&path, &own, stdin, io::stdout()));
        Self { shared, threads: vec![thread], modes }
    }

    /// True if the user pressed the keys that end the machine.
    pub(super) fn is_ended(&self) -> bool {
        self.shared.ended.load(Ordering::Relaxed)
    }

    /// Waits until the whole output of the console is shown, after the emulator has ended. Then restores the user's terminal.
    pub(super) fn finish(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // The thread does not panic.
            let _ = thread.join();
        }
        if let Some(modes) = self.modes.take() {
            // Ignore an error, because the modes cannot be restored in another way.
            let _ = tcsetattr(io::stdin(), OptionalActions::Drain, &modes);
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Returns rows and columns of the user's terminal, if standard input is a terminal and its size is known.
pub(super) fn window() -> Option<(u16, u16)> {
    let size = tcgetwinsize(io::stdin()).ok()?;
    (size.ws_row > 0 && size.ws_col > 0).then_some((size.ws_row, size.ws_col))
}

/// Connects to the socket as soon as it exists. Then copies data in both directions until the emulator closes the socket, or
/// until a stop is requested.
fn hand_on(path: &Path, shared: &Shared, input: impl AsFd + Read, mut output: impl Write) {
    let mut socket = loop {
        match UnixStream::connect(path) {
            Ok(socket) => break socket,
            Err(_) if shared.stop.load(Ordering::Relaxed) => return,
            Err(_) => thread::sleep(POLL),
        }
    };
    let mut keys = Keys::default();
    let mut input = Some(input);
    let mut bytes = [0; 4096];
    loop {
        let (from_console, from_input) = ready(&socket, input.as_ref());
        if from_console {
            match socket.read(&mut bytes) {
                Ok(count) if count > 0 => {
                    // The program that reads our output may have ended. The command continues anyway.
                    let _ = output.write_all(&bytes[..count]).and_then(|()| output.flush());
                }
                _ => return,
            }
        } else if shared.stop.load(Ordering::Relaxed) {
            return;
        }
        if from_input && let Some(source) = &mut input {
            match source.read(&mut bytes) {
                Ok(count) if count > 0 => {
                    if keys.ask_for_the_end(&bytes[..count], Instant::now()) {
                        shared.ended.store(true, Ordering::Relaxed);
                    }
                    // Ignore an error: the machine may just be ending.
                    let _ = socket.write_all(&bytes[..count]);
                }
                _ => input = None,
            }
        }
    }
}

/// Returns two flags: true if the console has data, and true if the input has data.
fn ready(socket: &UnixStream, input: Option<&impl AsFd>) -> (bool, bool) {
    let readable = PollFlags::IN;
    let mut files = vec![PollFd::new(socket, readable)];
    files.extend(input.map(|input| PollFd::new(input, readable)));
    let time = Timespec { tv_sec: 0, tv_nsec: i64::from(POLL.subsec_nanos()) };
    if poll(&mut files, Some(&time)).is_err() {
        return (false, false);
    }
    let is = |at: usize| files.get(at).is_some_and(|file| !file.revents().is_empty());
    (is(0), is(1))
}

/// Times of the last consecutive presses of [`ESCAPE`].
#[derive(Default)]
struct Keys(Vec<Instant>);

impl Keys {
    fn ask_for_the_end(&mut self, bytes: &[u8], now: Instant) -> bool {
        for &byte in bytes {
            if byte == ESCAPE {
                self.0.retain(|&at| now.duration_since(at) <= PRESS_TIME);
                self.0.push(now);
            } else {
                self.0.clear();
            }
            if self.0.len() >= PRESSES {
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn only_three_presses_in_a_second_end_the_machine() {
        let start = Instant::now();
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        let mut keys = Keys::default();
        assert!(!keys.ask_for_the_end(&[ESCAPE, ESCAPE, b'a', ESCAPE], at(0)));
        assert!(!keys.ask_for_the_end(&[ESCAPE], at(100)));
        assert!(!keys.ask_for_the_end(&[ESCAPE], at(2000)), "too late");
        assert!(!keys.ask_for_the_end(&[ESCAPE], at(2400)));
        assert!(keys.ask_for_the_end(&[ESCAPE], at(2900)));
    }

    #[test]
    fn terminal_forwards_both_ways_and_shows_the_last_output() {
        let dir = tempfile::tempdir().unwrap();
        let (path, typed, shown) = (dir.path().join("socket"), dir.path().join("typed"), dir.path().join("shown"));
        std::fs::write(&typed, "keys").unwrap();
        let (input, output) = (File::open(&typed).unwrap(), File::create(&shown).unwrap());
        let shared = Arc::<Shared>::default();
        let (place, own) = (path.clone(), shared.clone());
        let thread = thread::spawn(move || hand_on(&place, &own, input, output));

        let listener = UnixListener::bind(&path).unwrap();
        let (mut console, _) = listener.accept().unwrap();
        let mut bytes = [0; 4];
        console.read_exact(&mut bytes).unwrap();
        console.write_all(b"login: ").unwrap();
        drop(console);
        thread.join().unwrap();

        assert_eq!(&bytes, b"keys");
        assert_eq!(std::fs::read(&shown).unwrap(), b"login: ");
        assert!(!shared.ended.load(Ordering::Relaxed));
    }
}

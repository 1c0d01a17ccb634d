// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The command's terminal: the emulated machine's virtual console, with this program's standard input and output at its other end.

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

/// How often the end is looked for.
const POLL: Duration = Duration::from_millis(100);

/// This key (Ctrl-]), pressed [`PRESSES`] times within [`PRESS_TIME`], ends the machine.
const ESCAPE: u8 = 0x1d;
const PRESSES: usize = 3;
const PRESS_TIME: Duration = Duration::from_secs(1);

/// A terminal that is handed on, until this value is dropped.
pub(super) struct Terminal {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// How the user's terminal was.
    modes: Option<Termios>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    ended: AtomicBool,
}

impl Terminal {
    /// Hands on what comes from standard input to the console's socket, and what comes from there to standard output. The user's
    /// terminal is raw from now on: keys that send signals are for the command.
    pub(super) fn start(socket: &Path) -> Self {
        let shared = Arc::<Shared>::default();
        let stdin = io::stdin();
        let modes = isatty(&stdin).then(|| tcgetattr(&stdin).ok()).flatten();
        if let Some(mut raw) = modes.clone() {
            raw.make_raw();
            // A terminal that refuses stays as it is.
            let _ = tcsetattr(&stdin, OptionalActions::Now, &raw);
        }
        let (path, own) = (PathBuf::from(socket), shared.clone());
        let thread = thread::spawn(move || hand_on(&path, &own, stdin, io::stdout()));
        Self { shared, threads: vec![thread], modes }
    }

    /// Whether the user asked for the machine's end.
    pub(super) fn is_ended(&self) -> bool {
        self.shared.ended.load(Ordering::Relaxed)
    }

    /// Waits until all that came from the console is shown, where the emulator has ended.
    pub(super) fn finish(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // It does not panic.
            let _ = thread.join();
        }
        if let Some(modes) = self.modes.take() {
            // Nothing else can be done with a terminal that refuses.
            let _ = tcsetattr(io::stdin(), OptionalActions::Drain, &modes);
        }
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Rows and columns of the user's terminal, if it is one and knows.
pub(super) fn window() -> Option<(u16, u16)> {
    let size = tcgetwinsize(io::stdin()).ok()?;
    (size.ws_row > 0 && size.ws_col > 0).then_some((size.ws_row, size.ws_col))
}

/// Connects to the socket as soon as there is one, and copies both ways until the socket's other end has gone or it is to stop.
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
                    // Who reads this may have gone: the command goes on all the same.
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
                    // The machine may just be going.
                    let _ = socket.write_all(&bytes[..count]);
                }
                _ => input = None,
            }
        }
    }
}

/// What there is to read: of the console, of the input.
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

/// When the last keys in a row were pressed that end the machine.
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
    fn three_presses_in_a_second_end_the_machine_and_no_others_do() {
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

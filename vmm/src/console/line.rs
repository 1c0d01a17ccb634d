// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A line between the guest's console and whoever comes to its other end, and goes again. What the guest writes while nobody is
//! there waits for the next one, the last of it if it is too much.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use devices::sandbox;
use devices::virtio::console::Size;
use rustix::event::{EventfdFlags, eventfd};

use super::peer::Peer;
use super::receiver::{Names, Receiver};
use crate::process::thread_roles::LINE;

/// Most bytes that wait for somebody to read them.
const KEPT: usize = 64 << 10;
/// How long one write waits for a reader who is there to make room for it, before output is lost: on the serial port a vCPU waits so
/// long, and a pause of the VM for a virtio-console.
const PATIENCE: Duration = Duration::from_millis(500);
/// How long a reader may take nothing when the VM ends, before the rest is not waited for.
const PATIENCE_AT_END: Duration = Duration::from_secs(1);
/// How long the end of a VM may take, however its output is read.
const MAX_END: Duration = Duration::from_secs(10);
/// How long input waits for room in the guest's receive buffer before it tries again.
const RETRY: Duration = Duration::from_millis(5);
/// Bytes of input that are read at a time.
const INPUT: usize = 256;

/// A line, and the thread that serves it. Dropping it hands over what waits for a reader who is there.
pub struct Line {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    pty: Option<PathBuf>,
}

struct Shared {
    /// What the log calls the console.
    name: &'static str,
    state: Mutex<State>,
    /// How long a write waits for room.
    patience: Duration,
    /// Output was taken, or somebody came or went.
    taken: Condvar,
    wake: OwnedFd,
}

#[derive(Default)]
struct State {
    output: VecDeque<u8>,
    /// Somebody is there.
    attached: bool,
    /// A write has waited for room in vain, and who is there took nothing since.
    stuck: bool,
    /// Bytes lost since then.
    lost: u64,
    /// Bytes that were ever lost.
    all_lost: u64,
    /// Who takes input.
    receiver: Option<Weak<dyn Receiver>>,
    closing: bool,
}

/// What the console writes with.
struct Pen(Arc<Shared>);

impl State {
    /// A reader has taken the oldest bytes.
    fn take(&mut self, len: usize) {
        self.output.drain(..len);
        self.stuck = false;
    }
}

impl Line {
    /// A line to a pseudoterminal.
    ///
    /// # Errors
    /// There can be no more pseudoterminals or threads.
    pub fn pty(names: Names) -> io::Result<Self> {
        let (peer, path) = Peer::pty()?;
        log::info!("{}: {}", names.shown, path.display());
        Self::new(names, peer, Some(path), PATIENCE)
    }

    /// A line to the client of a socket at `path`; the one that comes last is served.
    ///
    /// # Errors
    /// The socket cannot be made, or there can be no more threads.
    pub fn socket(names: Names, path: &Path) -> io::Result<Self> {
        Self::new(names, Peer::socket(path)?, None, PATIENCE)
    }

    fn new(names: Names, peer: Peer, pty: Option<PathBuf>, patience: Duration) -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        let (state, taken) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { name: names.shown, state, patience, taken, wake });
        let of_thread = shared.clone();
        let thread = sandbox::start(LINE, names.thread.into(), move || of_thread.serve(peer))?;
        Ok(Self { shared, thread: Some(thread), pty })
    }

    /// The path of the pseudoterminal, if it is one.
    pub fn pty_path(&self) -> Option<&Path> {
        self.pty.as_deref()
    }

    /// Bytes that were lost while a reader was attached.
    pub fn lost_bytes(&self) -> u64 {
        self.shared.lock().all_lost
    }

    /// What the console writes with: a write never fails, and waits for half a second at most.
    pub fn writer(&self) -> Box<dyn Write + Send> {
        Box::new(Pen(self.shared.clone()))
    }

    /// Hands input to `receiver`, and tells it of the terminal's size.
    pub fn connect(&self, receiver: &Arc<dyn Receiver>) {
        self.shared.lock().receiver = Some(Arc::downgrade(receiver));
        self.shared.wake();
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            // It has nothing to say of how it ended.
            let _ = thread.join();
        }
    }
}

impl Write for Pen {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.push(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // It fails only where nobody has read a great many, and then it wakes as well.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Queues output. If there is no room, waits for a reader who is there to make some, but not longer than its patience lasts, however
    /// little is taken meanwhile; then the oldest is lost.
    fn push(&self, bytes: &[u8]) {
        let state = self.lock();
        let full = |state: &mut State| state.attached && !state.stuck && state.output.len() + bytes.len() > KEPT;
        let waited = self.taken.wait_timeout_while(state, self.patience, full);
        let (mut state, outcome) = waited.unwrap_or_else(PoisonError::into_inner);
        state.stuck |= outcome.timed_out();
        let was_empty = state.output.is_empty();
        state.output.extend(bytes);
        let surplus = state.output.len().saturating_sub(KEPT);
        state.output.drain(..surplus);
        if state.attached {
            state.lost += surplus as u64;
            state.all_lost += surplus as u64;
        }
        drop(state);
        if was_empty {
            self.wake();
        }
    }

    /// The thread: until the line is dropped.
    fn serve(&self, mut peer: Peer) {
        let mut input = Vec::with_capacity(INPUT);
        let mut deadlines: Option<(Instant, Instant)> = None;
        let mut size = None;
        loop {
            peer.look();
            self.set_attached(peer.is_there());
            self.tell_size(&peer, &mut size);
            let progress = self.send(&mut peer);
            let (waits, closing) = {
                let state = self.lock();
                (peer.is_there() && !state.output.is_empty(), state.closing)
            };
            if closing {
                let now = Instant::now();
                let (patience, end) = deadlines.get_or_insert((now + PATIENCE_AT_END, now + MAX_END));
                if progress {
                    *patience = now + PATIENCE_AT_END;
                }
                if !waits || now >= *patience.min(end) {
                    return;
                }
            }
            self.receive(&mut peer, &mut input);
            // Reading and writing find out who has gone.
            self.set_attached(peer.is_there());
            let limit = if !input.is_empty() {
                Some(RETRY)
            } else {
                deadlines.map(|(patience, end)| patience.min(end).saturating_duration_since(Instant::now()))
            };
            // What is read goes nowhere while input waits.
            let look = self.receiver().is_some_and(|receiver| receiver.has_size());
            if let Err(error) = peer.wait(self.wake.as_fd(), input.is_empty(), waits, look, limit) {
                log::warn!("{}: waiting for its other end: {error}", self.name);
                self.set_attached(false);
                return;
            }
            // Nobody else reads it, and it is read before what it tells of.
            let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        }
    }

    fn set_attached(&self, attached: bool) {
        let mut state = self.lock();
        if state.attached == attached {
            return;
        }
        state.attached = attached;
        state.stuck = false;
        state.lost = 0;
        drop(state);
        self.taken.notify_all();
    }

    /// Writes what waits, as far as there is room; returns whether there was any.
    fn send(&self, peer: &mut Peer) -> bool {
        let mut state = self.lock();
        let mut sent = false;
        while peer.is_there() && !state.output.is_empty() {
            let written = peer.write(state.output.as_slices().0);
            if written == 0 {
                break;
            }
            state.take(written);
            sent = true;
        }
        let lost = if sent { std::mem::take(&mut state.lost) } else { 0 };
        drop(state);
        if sent {
            self.taken.notify_all();
        }
        if lost > 0 {
            log::warn!("{}: {lost} bytes are lost: nobody read them in time", self.name);
        }
        sent
    }

    /// Hands what is typed to the guest. It is dropped while there is none.
    fn receive(&self, peer: &mut Peer, input: &mut Vec<u8>) {
        if input.is_empty() {
            input.resize(INPUT, 0);
            let read = peer.read(input);
            input.truncate(read);
        }
        // Without the lock: the guest's end holds its own while it writes here.
        let receiver = self.receiver();
        let taken = receiver.map_or(input.len(), |receiver| receiver.receive(input));
        input.drain(..taken);
    }

    fn receiver(&self) -> Option<Arc<dyn Receiver>> {
        self.lock().receiver.as_ref().and_then(Weak::upgrade)
    }

    /// Tells the guest of the terminal's size if it is another than `told`.
    fn tell_size(&self, peer: &Peer, told: &mut Option<Size>) {
        let Some(receiver) = self.receiver().filter(|receiver| receiver.has_size()) else { return };
        let size = peer.size();
        if size.is_some() && size != *told {
            *told = size;
            receiver.resize(size.unwrap_or_default());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};
    use std::io::Read;
    use std::os::unix::fs::OpenOptionsExt;
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;
    use std::thread;

    use devices::pc::serial::SerialPort;
    use rustix::termios::{Winsize, tcsetwinsize};
    use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

    use super::*;

    const NAMES: Names = Names { shown: "serial port", thread: "serial" };
    /// Ends a test that hangs.
    const LONG: Duration = Duration::from_secs(120);

    fn socket() -> (tempfile::TempDir, PathBuf, Line) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("serial.sock");
        let line = Line::socket(NAMES, &path).unwrap();
        (dir, path, line)
    }

    fn read(mut from: impl Read, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        from.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn wait_until(what: &str, holds: impl Fn() -> bool) {
        let start = Instant::now();
        while !holds() {
            assert!(start.elapsed() < LONG, "{what}");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Opens the other end of a line. A test that leads a session must not get it as its controlling terminal: SIGHUP would end it.
    fn open_terminal(path: &Path) -> File {
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOCTTY).open(path).unwrap()
    }

    /// A port whose receiver says what it gets.
    fn port() -> Arc<SerialPort> {
        Arc::new(SerialPort::new(EventFd::new(EFD_NONBLOCK).unwrap(), Box::new(io::sink())))
    }

    fn received(port: &SerialPort) -> Vec<u8> {
        use devices::platform::BusDevice;

        let register = |offset| {
            let mut byte = [0];
            port.read(offset, &mut byte);
            byte[0]
        };
        let mut bytes = Vec::new();
        // The line status register's lowest bit: there is data.
        while register(5) & 1 == 1 {
            bytes.push(register(0));
        }
        bytes
    }

    #[test]
    fn who_comes_late_gets_the_last_of_what_was_written() {
        let (_dir, path, line) = socket();
        let mut pen = line.writer();
        let all: Vec<u8> = (0..40_000u32).flat_map(u32::to_le_bytes).collect();
        all.chunks(100).for_each(|bytes| pen.write_all(bytes).unwrap());
        assert!(!line.shared.lock().stuck, "a write waited for a reader");

        let client = UnixStream::connect(&path).unwrap();
        assert!(read(&client, KEPT) == all[all.len() - KEPT..]);
        pen.write_all(b"more").unwrap();
        assert_eq!(read(&client, 4), b"more");
    }

    #[test]
    fn who_reads_slowly_loses_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("serial.sock");
        // A reader that gets no CPU for a while is not one that reads nothing.
        let line = Line::new(NAMES, Peer::socket(&path).unwrap(), None, LONG).unwrap();
        let client = UnixStream::connect(&path).unwrap();
        wait_until("nobody is there", || line.shared.lock().attached);
        let all: Vec<u8> = (0..200_000u32).flat_map(u32::to_le_bytes).collect();
        let len = all.len();
        let reader = thread::spawn(move || {
            let mut got = Vec::new();
            while got.len() < len {
                got.extend(read(&client, 20_000));
                thread::sleep(Duration::from_millis(5));
            }
            got
        });
        let mut pen = line.writer();
        all.chunks(7).for_each(|bytes| pen.write_all(bytes).unwrap());
        assert!(reader.join().unwrap() == all);
    }

    #[test]
    fn byte_by_byte_client_delays_a_write_only_briefly() {
        let state = State { attached: true, output: vec![b'x'; KEPT].into(), ..State::default() };
        let wake = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let (state, taken) = (Mutex::new(state), Condvar::new());
        let shared = Shared { name: NAMES.shown, state, patience: PATIENCE, taken, wake };
        let (shared, over) = (Arc::new(shared), Arc::new(AtomicBool::new(false)));
        let (of_reader, until) = (shared.clone(), over.clone());
        let reader = thread::spawn(move || {
            let mut taken = 0;
            while !until.load(Ordering::Relaxed) {
                thread::sleep(PATIENCE / 5);
                of_reader.lock().take(1);
                of_reader.taken.notify_all();
                taken += 1;
            }
            taken
        });
        let (done, is_done) = mpsc::channel();
        let start = Instant::now();
        thread::spawn(move || {
            shared.push(&[b'y'; 4096]);
            done.send((start.elapsed(), shared.lock().lost)).unwrap();
        });

        // By single bytes, room for all would take longer.
        let outcome = is_done.recv_timeout(LONG);

        over.store(true, Ordering::Relaxed);
        let taken = reader.join().unwrap();
        let (time, lost) = outcome.expect("the write goes on for as long as bytes are taken");
        assert!(time >= PATIENCE, "{time:?}");
        assert!(lost > 0 && lost + taken >= 4096, "{lost} lost, {taken} taken");
    }

    #[test]
    fn stalled_client_delays_the_guest_once_and_then_the_end() {
        let (_dir, path, line) = socket();
        let _client = UnixStream::connect(&path).unwrap();
        wait_until("nobody is there", || line.shared.lock().attached);
        let mut pen = line.writer();
        let start = Instant::now();
        (0..1_000).for_each(|_| pen.write_all(&[b'x'; 1000]).unwrap());
        assert!((PATIENCE..LONG).contains(&start.elapsed()), "{:?}", start.elapsed());
        assert!(line.shared.lock().lost > 100_000);
        let start = Instant::now();
        drop(line);
        assert!((PATIENCE_AT_END..LONG).contains(&start.elapsed()), "{:?}", start.elapsed());
        assert!(!path.exists());
    }

    #[test]
    fn last_client_is_served_and_the_one_before_is_cut_off() {
        let (_dir, path, line) = socket();
        let port = port();
        line.connect(&(port.clone() as Arc<dyn Receiver>));
        let mut first = UnixStream::connect(&path).unwrap();
        first.write_all(b"a").unwrap();
        wait_until("no input", || received(&port) == b"a");
        let mut second = UnixStream::connect(&path).unwrap();
        second.write_all(b"b").unwrap();
        wait_until("no input", || received(&port) == b"b");
        assert_eq!(first.read(&mut [0]).unwrap(), 0);
        drop(second);
        wait_until("somebody is there", || !line.shared.lock().attached);
        line.writer().write_all(b"kept").unwrap();
        assert_eq!(read(UnixStream::connect(&path).unwrap(), 4), b"kept");
    }

    #[test]
    fn input_waits_for_room_in_the_port_and_none_of_it_is_lost() {
        let (_dir, path, line) = socket();
        let port = port();
        line.connect(&(port.clone() as Arc<dyn Receiver>));
        let mut client = UnixStream::connect(&path).unwrap();
        let typed: Vec<u8> = (0..1000u32).map(|number| number.to_le_bytes()[0]).collect();
        client.write_all(&typed).unwrap();
        let mut got = Vec::new();
        let start = Instant::now();
        while got.len() < typed.len() {
            got.extend(received(&port));
            assert!(start.elapsed() < LONG, "{} bytes", got.len());
        }
        assert!(got == typed);
    }

    #[test]
    fn pseudoterminal_is_raw_and_may_be_opened_again_and_again() {
        let line = Line::pty(NAMES).unwrap();
        let port = port();
        line.connect(&(port.clone() as Arc<dyn Receiver>));
        let path = line.pty_path().unwrap().to_path_buf();
        line.writer().write_all(b"before\n").unwrap();
        for round in 0..3 {
            let mut terminal = open_terminal(&path);
            let expected: &[u8] = if round == 0 { b"before\n" } else { b"kept\n" };
            assert_eq!(read(&terminal, expected.len()), expected);
            // Neither echoed nor changed.
            terminal.write_all(b"ls\r\x03").unwrap();
            wait_until("no input", || received(&port) == b"ls\r\x03");
            drop(terminal);
            wait_until("somebody is there", || !line.shared.lock().attached);
            line.writer().write_all(b"kept\n").unwrap();
        }
    }

    /// A console that learns of its terminal's size.
    #[derive(Default)]
    struct Sized(Mutex<Vec<Size>>);

    impl Receiver for Sized {
        fn receive(&self, bytes: &[u8]) -> usize {
            bytes.len()
        }

        fn has_size(&self) -> bool {
            true
        }

        fn resize(&self, size: Size) {
            self.0.lock().unwrap().push(size);
        }
    }

    #[test]
    fn guest_receives_each_size_of_the_pseudoterminal() {
        let line = Line::pty(NAMES).unwrap();
        let console = Arc::new(Sized::default());
        line.connect(&(console.clone() as Arc<dyn Receiver>));
        let terminal = open_terminal(line.pty_path().unwrap());
        for (columns, rows) in [(80, 24), (132, 50)] {
            let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
            tcsetwinsize(&terminal, size).unwrap();
            wait_until("the guest is not told", || console.0.lock().unwrap().last() == Some(&Size { columns, rows }));
        }
    }

    #[test]
    fn line_without_anybody_ends_at_once() {
        let end = || {
            let line = Line::pty(NAMES).unwrap();
            line.writer().write_all(&[b'x'; 200_000]).unwrap();
            let start = Instant::now();
            drop(line);
            start.elapsed()
        };
        // A line that waits takes as long each time. A machine that stands still does not.
        assert!((0..20).any(|_| end() < PATIENCE_AT_END));
    }
}

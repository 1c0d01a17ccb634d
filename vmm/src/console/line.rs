// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Line between the guest's console and a peer, which may connect and disconnect. While no peer is connected, output
//! is kept for the next peer. If the buffer overflows, the oldest output is lost.

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

/// Maximum bytes of output that wait for a reader.
const KEPT: usize = 64 << 10;
/// Maximum time that one write waits for room in the buffer if a reader is connected. After this time, output is lost. On the serial
/// port, the writing vCPU can wait this long. On a virtio-console, a pause of the VM can wait this long.
const TIMEOUT: Duration = Duration::from_millis(500);
/// Maximum time that the end of the VM waits for a reader that reads nothing. After this time, the remaining output is lost.
const TIMEOUT_AT_END: Duration = Duration::from_secs(1);
/// Maximum time to deliver the remaining output when the VM ends.
const MAX_END: Duration = Duration::from_secs(10);
/// Delay before input is offered again to a guest whose receive buffer was full.
const RETRY: Duration = Duration::from_millis(5);
/// Maximum bytes of input per read.
const INPUT: usize = 256;

/// Line, and the thread that serves it. Dropping the line waits for a connected reader to read the remaining output, for at most 10 s.
pub struct Line {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    pty: Option<PathBuf>,
}

struct Shared {
    /// Name of the console in the log.
    name: &'static str,
    state: Mutex<State>,
    /// Maximum time that a write waits for room.
    timeout: Duration,
    /// Notified when a peer received output, connected or disconnected.
    taken: Condvar,
    wake: OwnedFd,
}

#[derive(Default)]
struct State {
    output: VecDeque<u8>,
    /// True if a peer is connected.
    attached: bool,
    /// True if a write timed out waiting for room, and the peer has received nothing since.
    stuck: bool,
    /// Lost bytes that the log has not reported yet.
    lost: u64,
    /// Total bytes lost so far while a peer was connected.
    all_lost: u64,
    /// Receiver of input.
    receiver: Option<Weak<dyn Receiver>>,
    closing: bool,
}

/// Writer of the console's output.
struct Pen(Arc<Shared>);

impl State {
    /// Removes the oldest `len` bytes, which the peer has received.
    fn take(&mut self, len: usize) {
        self.output.drain(..len);
        self.stuck = false;
    }
}

impl Line {
    /// Creates a line to a pseudoterminal.
    ///
    /// # Errors
    /// The host cannot create more pseudoterminals or threads.
    pub fn pty(names: Names) -> io::Result<Self> {
        let (peer, path) = Peer::pty()?;
        log::info!("{}: {}", names.shown, path.display());
        Self::new(names, peer, Some(path), TIMEOUT)
    }

    /// Creates a line to the client of a socket at `path`. A new client replaces the previous one.
    ///
    /// # Errors
    /// The socket or a thread cannot be created.
    pub fn socket(names: Names, path: &Path) -> io::Result<Self> {
        Self::new(names, Peer::socket(path)?, None, TIMEOUT)
    }

    fn new(names: Names, peer: Peer, pty: Option<PathBuf>, timeout: Duration) -> io::Result<Self> {
        let wake = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        let (state, taken) = (Mutex::default(), Condvar::new());
        let shared = Arc::new(Shared { name: names.shown, state, timeout, taken, wake });
        let of_thread = shared.clone();
        let thread = sandbox::start(LINE, names.thread.into(), move || of_thread.serve(peer))?;
        Ok(Self { shared, thread: Some(thread), pty })
    }

    /// Returns the path of the pseudoterminal, if the line has one.
    pub fn pty_path(&self) -> Option<&Path> {
        self.pty.as_deref()
    }

    /// Returns the number of bytes that were lost while a peer was connected.
    pub fn lost_bytes(&self) -> u64 {
        self.shared.lock().all_lost
    }

    /// Returns the writer of the console's output. A write never fails, and waits at most half a second.
    pub fn writer(&self) -> Box<dyn Write + Send> {
        Box::new(Pen(self.shared.clone()))
    }

    /// Connects input to `receiver`, and reports the terminal's size to `receiver`.
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
            // The thread returns no value.
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
        // The write fails only if the eventfd's counter is already near its maximum. In this case, the thread wakes anyway.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Queues output. If there is no room, waits at most `timeout` for a connected reader to make room. The limit applies even if the
    /// reader receives some bytes meanwhile. If there is still no room, the oldest output is lost.
    fn push(&self, bytes: &[u8]) {
        let state = self.lock();
        let full = |state: &mut State| state.attached && !state.stuck && state.output.len() + bytes.len() > KEPT;
        let waited = self.taken.wait_timeout_while(state, self.timeout, full);
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

    /// Body of the thread. It runs until the line is dropped.
    fn serve(&self, mut peer: Peer) {
        let mut input = Vec::with_capacity(INPUT);
        let mut deadlines: Option<(Instant, Instant)> = None;
        let mut size = None;
        loop {
            peer.look();
            self.set_attached(peer.is_there());
            self.announce_size(&peer, &mut size);
            let progress = self.send(&mut peer);
            let (waits, closing) = {
                let state = self.lock();
                (peer.is_there() && !state.output.is_empty(), state.closing)
            };
            if closing {
                let now = Instant::now();
                let (timeout, end) = deadlines.get_or_insert((now + TIMEOUT_AT_END, now + MAX_END));
                if progress {
                    *timeout = now + TIMEOUT_AT_END;
                }
                if !waits || now >= *timeout.min(end) {
                    return;
                }
            }
            self.receive(&mut peer, &mut input);
            // `send` and `receive` may have detected that the peer has disconnected.
            self.set_attached(peer.is_there());
            let limit = if !input.is_empty() {
                Some(RETRY)
            } else {
                deadlines.map(|(timeout, end)| timeout.min(end).saturating_duration_since(Instant::now()))
            };
            // While earlier input waits for the guest, no more input is read from the peer.
            let look = self.receiver().is_some_and(|receiver| receiver.has_size());
            if let Err(error) = peer.wait(self.wake.as_fd(), input.is_empty(), waits, look, limit) {
                log::warn!(
                    "{}: the console is disconnected, because waiting for data from its other end failed: {error}",
                    self.name
                );
                self.set_attached(false);
                return;
            }
            // This read clears the event before the thread acts on the changes, so the thread misses no change. Only this thread reads the
            // event.
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

    /// Writes as much queued output as the peer has room for. Returns true if anything was written.
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
            log::warn!(
                "{}: {lost} bytes of the guest's output are lost, because the process at the other end did not read them in time; read the output continuously",
                self.name
            );
        }
        sent
    }

    /// Passes input from the peer to the guest. Input that arrives before the receiver is connected waits in `input`. After the receiver
    /// was dropped, input is dropped.
    fn receive(&self, peer: &mut Peer, input: &mut Vec<u8>) {
        if input.is_empty() {
            input.resize(INPUT, 0);
            let read = peer.read(input);
            input.truncate(read);
        }
        // The state's lock is not held during the call, because the receiver holds its own lock while it writes output to this line.
        let Some(receiver) = self.lock().receiver.clone() else { return };
        let taken = receiver.upgrade().map_or(input.len(), |receiver| receiver.receive(input));
        input.drain(..taken);
    }

    fn receiver(&self) -> Option<Arc<dyn Receiver>> {
        self.lock().receiver.as_ref().and_then(Weak::upgrade)
    }

    /// Reports the terminal's size to the guest if it differs from `announced`.
    fn announce_size(&self, peer: &Peer, announced: &mut Option<Size>) {
        let Some(receiver) = self.receiver().filter(|receiver| receiver.has_size()) else { return };
        let size = peer.size();
        if size.is_some() && size != *announced {
            *announced = size;
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
    /// Maximum time of a step. A test that hangs fails after this time.
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

    /// Opens the other end of a line. If the test process is a session leader, the terminal must not become its controlling terminal,
    /// because SIGHUP would end the test.
    fn open_terminal(path: &Path) -> File {
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOCTTY).open(path).unwrap()
    }

    /// Creates a serial port that stores received input.
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
        // Lowest bit of the line status register: data is available.
        while register(5) & 1 == 1 {
            bytes.push(register(0));
        }
        bytes
    }

    #[test]
    fn late_reader_gets_the_last_part_of_the_output() {
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
    fn input_before_the_receiver_is_connected_waits() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("serial.sock");
        let mut peer = Peer::socket(&path).unwrap();
        let wake = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let (state, taken) = (Mutex::default(), Condvar::new());
        let shared = Shared { name: NAMES.shown, state, timeout: TIMEOUT, taken, wake };
        let mut client = UnixStream::connect(&path).unwrap();
        client.write_all(b"early").unwrap();
        peer.look();
        let mut input = Vec::new();
        shared.receive(&mut peer, &mut input);
        assert_eq!(input, b"early");

        let port = port();
        shared.lock().receiver = Some(Arc::downgrade(&(port.clone() as Arc<dyn Receiver>)));
        shared.receive(&mut peer, &mut input);
        assert!(input.is_empty());
        assert_eq!(received(&port), b"early");

        drop(port);
        client.write_all(b"late").unwrap();
        shared.receive(&mut peer, &mut input);
        assert!(input.is_empty(), "no guest will read the input");
    }

    #[test]
    fn slow_reader_loses_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("serial.sock");
        // With a long time limit, a reader that gets no CPU for a while does not count as stuck.
        let line = Line::new(NAMES, Peer::socket(&path).unwrap(), None, LONG).unwrap();
        let client = UnixStream::connect(&path).unwrap();
        wait_until("no peer is connected", || line.shared.lock().attached);
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
        let shared = Shared { name: NAMES.shown, state, timeout: TIMEOUT, taken, wake };
        let (shared, over) = (Arc::new(shared), Arc::new(AtomicBool::new(false)));
        let (of_reader, until) = (shared.clone(), over.clone());
        let reader = thread::spawn(move || {
            let mut taken = 0;
            while !until.load(Ordering::Relaxed) {
                thread::sleep(TIMEOUT / 5);
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

        // A reader that reads single bytes would need longer than the time limit to make room for the whole write.
        let outcome = is_done.recv_timeout(LONG);

        over.store(true, Ordering::Relaxed);
        let taken = reader.join().unwrap();
        let (time, lost) = outcome.expect("the write must end although the reader still takes bytes");
        assert!(time >= TIMEOUT, "{time:?}");
        assert!(lost > 0 && lost + taken >= 4096, "{lost} lost, {taken} taken");
    }

    #[test]
    fn stalled_client_delays_the_guest_once_and_then_the_end() {
        let (_dir, path, line) = socket();
        let _client = UnixStream::connect(&path).unwrap();
        wait_until("no peer is connected", || line.shared.lock().attached);
        let mut pen = line.writer();
        let start = Instant::now();
        (0..1_000).for_each(|_| pen.write_all(&[b'x'; 1000]).unwrap());
        assert!((TIMEOUT..LONG).contains(&start.elapsed()), "{:?}", start.elapsed());
        assert!(line.shared.lock().lost > 100_000);
        let start = Instant::now();
        drop(line);
        assert!((TIMEOUT_AT_END..LONG).contains(&start.elapsed()), "{:?}", start.elapsed());
        assert!(!path.exists());
    }

    #[test]
    fn new_client_replaces_the_previous_client() {
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
        wait_until("a peer is still connected", || !line.shared.lock().attached);
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
            // The terminal neither echoes nor changes the input.
            terminal.write_all(b"ls\r\x03").unwrap();
            wait_until("no input", || received(&port) == b"ls\r\x03");
            drop(terminal);
            wait_until("a peer is still connected", || !line.shared.lock().attached);
            line.writer().write_all(b"kept\n").unwrap();
        }
    }

    /// Console that receives its terminal's size.
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
            wait_until("the guest has no size", || console.0.lock().unwrap().last() == Some(&Size { columns, rows }));
        }
    }

    #[test]
    fn line_without_a_peer_ends_at_once() {
        let end = || {
            let line = Line::pty(NAMES).unwrap();
            line.writer().write_all(&[b'x'; 200_000]).unwrap();
            let start = Instant::now();
            drop(line);
            start.elapsed()
        };
        // If the line waited, each try would take at least `TIMEOUT_AT_END`. A stall of the machine delays only some tries.
        assert!((0..20).any(|_| end() < TIMEOUT_AT_END));
    }
}

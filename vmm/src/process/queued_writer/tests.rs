// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of queues with outputs that accept no bytes, some bytes, or all bytes. No test depends on the speed of the machine, because the
//! tests control the clock.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::sync::mpsc;
use std::thread;
use std::time::Instant;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

use super::*;

const LIMIT: u64 = 16 << 10;
const TIMEOUT: Duration = Duration::from_millis(300);
const LONG: Duration = Duration::from_secs(20);

/// Clock that never advances, so that waits do not time out.
struct Frozen(Instant);

impl Clock for Frozen {
    fn now(&self) -> Instant {
        self.0
    }

    fn wait<'a>(&self, changed: &Condvar, state: MutexGuard<'a, State>, _: Duration) -> MutexGuard<'a, State> {
        changed.wait(state).unwrap()
    }
}

/// Clock that advances only during waits: each wait takes its full limit. With a gate, each wait also lets one write complete.
struct Hasty {
    gate: Option<Gate>,
    start: Instant,
    passed: Mutex<Duration>,
}

impl Clock for Hasty {
    fn now(&self) -> Instant {
        self.start + *self.passed.lock().unwrap()
    }

    fn wait<'a>(&self, changed: &Condvar, state: MutexGuard<'a, State>, limit: Duration) -> MutexGuard<'a, State> {
        *self.passed.lock().unwrap() += limit;
        let Some(gate) = &self.gate else { return state };
        let before = state.written;
        gate.open(1);
        changed.wait_while(state, |state| state.written == before).unwrap()
    }
}

fn frozen() -> Box<dyn Clock> {
    Box::new(Frozen(Instant::now()))
}

fn hasty() -> Box<dyn Clock> {
    Box::new(Hasty { gate: None, start: Instant::now(), passed: Mutex::default() })
}

#[derive(Default)]
struct Taken {
    bytes: Vec<u8>,
    /// Number of writes that may complete.
    allowed: u64,
    /// True while a write waits for the test.
    waits: bool,
}

/// Output that completes a write only when the test allows it.
#[derive(Clone, Default)]
struct Gate(Arc<(Mutex<Taken>, Condvar)>);

impl Gate {
    fn open(&self, writes: u64) {
        self.0.0.lock().unwrap().allowed += writes;
        self.0.1.notify_all();
    }

    /// Waits until a write is blocked.
    fn wait_until_held(&self) {
        let (taken, changed) = &*self.0;
        drop(changed.wait_while(taken.lock().unwrap(), |taken| !taken.waits).unwrap());
    }

    fn bytes(&self) -> Vec<u8> {
        self.0.0.lock().unwrap().bytes.clone()
    }
}

impl Output for Gate {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let (taken, changed) = &*self.0;
        let mut taken = taken.lock().unwrap();
        taken.waits = taken.allowed == 0;
        changed.notify_all();
        taken = changed.wait_while(taken, |taken| taken.allowed == 0).unwrap();
        taken.allowed -= 1;
        taken.waits = false;
        taken.bytes.extend(bytes);
        Ok(bytes.len())
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.0.0.lock().unwrap().bytes.len() as u64)
    }
}

fn queue(gate: &Gate, clock: Box<dyn Clock>) -> QueuedWriter {
    let shared = Shared::new("--test", LIMIT, PIECE, None, clock);
    QueuedWriter::start(shared, Pen::new(gate.clone(), u64::MAX)).unwrap()
}

fn queue_of_lines(gate: &Gate, clock: Box<dyn Clock>) -> QueuedWriter {
    let notice: Notice = Box::new(|count| format!("{count} lost\n").into_bytes());
    let shared = Shared::new("--test", LIMIT, PIECE, Some(notice), clock);
    QueuedWriter::start(shared, Pen::new(gate.clone(), u64::MAX)).unwrap()
}

/// Creates a full queue, whose output accepts nothing. Also returns the queued bytes.
fn full(clock: Box<dyn Clock>) -> (Gate, QueuedWriter, Vec<u8>) {
    let gate = Gate::default();
    let queue = queue(&gate, clock);
    let mut queued = Vec::new();
    let has_room = || queue.0.has_room(&queue.0.lock(), &[b'x'; PIECE]);
    while has_room() {
        queue.push(&[b'x'; PIECE], TIMEOUT);
        queued.extend([b'x'; PIECE]);
    }
    gate.wait_until_held();
    (gate, queue, queued)
}

/// Returns consecutive 32-bit numbers, so that a lost or repeated piece is visible.
fn bytes(len: u32) -> Vec<u8> {
    (0..len / 4).flat_map(u32::to_le_bytes).collect()
}

#[test]
fn full_file_takes_more_once_it_is_truncated() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let appending = File::options().append(true).open(file.path()).unwrap();
    let shared = Shared::new("--test", LIMIT, PIECE, None, frozen());
    let writer = QueuedWriter::start(shared, Pen::new(appending, 1000)).unwrap();
    let len = || file.as_file().metadata().unwrap().len();
    for _ in 0..30 {
        writer.push(&[7; 100], TIMEOUT);
        assert!(writer.drain(LONG, LONG));
    }
    assert_eq!((len(), writer.lost()), (1000, 2000));
    file.as_file().set_len(0).unwrap();
    writer.push(&[8; 100], TIMEOUT);
    assert!(writer.drain(LONG, LONG));
    assert_eq!(std::fs::read(file.path()).unwrap(), [8; 100]);
}

#[test]
fn stalled_reader_delays_once_and_later_gets_queued_bytes() {
    let (gate, queue, mut queued) = full(hasty());
    let start = queue.0.clock.now();
    (0..1000).for_each(|_| queue.push(b"lost", TIMEOUT));
    assert_eq!(queue.0.clock.now() - start, TIMEOUT);
    assert_eq!((queue.lost(), queue.0.lock().unreported), (4000, 4000));
    gate.open(u64::MAX);
    // On this clock, each drain gives up immediately, so the test retries until all bytes are written.
    while !queue.drain(LONG, LONG) {
        thread::yield_now();
    }
    assert!(!queue.0.lock().stuck);
    assert_eq!(queue.0.lock().unreported, 0);
    queue.push(b"after", TIMEOUT);
    queued.extend(b"after");
    while !queue.drain(LONG, LONG) {
        thread::yield_now();
    }
    assert!(gate.bytes() == queued);
}

#[test]
fn slow_reader_loses_nothing() {
    let (mut reader, writer) = io::pipe().unwrap();
    let shared = Shared::new("--test", LIMIT, PIECE, None, frozen());
    let queue = QueuedWriter::start(shared, Pen::new(File::from(OwnedFd::from(writer)), u64::MAX)).unwrap();
    let bytes = bytes(200_000);
    let slow = thread::spawn(move || {
        let mut all = Vec::new();
        reader.read_to_end(&mut all).unwrap();
        all
    });
    bytes.chunks(1).for_each(|byte| queue.push(byte, TIMEOUT));
    assert!(queue.drain(LONG, LONG));
    assert_eq!(queue.lost(), 0);
    drop(queue);
    assert!(slow.join().unwrap() == bytes);
}

#[test]
fn first_push_gets_room_first_though_another_needs_less() {
    let (gate, queue, mut expected) = full(frozen());
    let queue = Arc::new(queue);
    let pushes = [(vec![b'z'; 4 * PIECE], 1), (vec![b'y'], 2)].map(|(bytes, pushing)| {
        expected.extend(&bytes);
        let of_thread = queue.clone();
        let push = thread::spawn(move || of_thread.push(&bytes, LONG));
        while queue.0.lock().pushing.len() < pushing {
            thread::yield_now();
        }
        push
    });
    gate.open(u64::MAX);
    pushes.into_iter().for_each(|push| push.join().unwrap());
    assert!(queue.drain(LONG, LONG));
    assert!(gate.bytes() == expected, "the pushes were written in another order");
}

#[test]
fn single_bytes_leave_room_for_a_piece() {
    let (gate, queue, _) = full(frozen());
    let queue = Arc::new(queue);
    let (sender, receiver) = mpsc::channel();
    let other = queue.clone();
    let single = thread::spawn(move || {
        while receiver.try_recv().is_err() {
            other.push(b"y", LONG);
        }
    });
    // The two threads compete for room: while one thread pushes, the other thread waits.
    let pieces = queue.clone();
    let piece = thread::spawn(move || (0..6).for_each(|_| pieces.push(&[b'z'; PIECE], LONG)));
    while !piece.is_finished() {
        gate.open(1);
        thread::yield_now();
    }
    piece.join().unwrap();
    sender.send(()).unwrap();
    gate.open(u64::MAX / 2);
    single.join().unwrap();
    assert!(queue.drain(LONG, LONG));
    assert_eq!(gate.bytes().iter().filter(|byte| **byte == b'z').count(), 6 * PIECE);
    assert_eq!(queue.lost(), 0);
}

#[test]
fn push_gives_up_after_its_timeout() {
    let (_gate, queue, _) = full(hasty());
    let start = queue.0.clock.now();
    queue.push(&[b'y'; 64 * PIECE], TIMEOUT);
    assert_eq!(queue.0.clock.now() - start, TIMEOUT);
    assert_eq!(queue.lost(), 64 * PIECE as u64);
}

#[test]
fn drain_ends_when_nothing_is_written() {
    let (_gate, queue, _) = full(hasty());
    let start = queue.0.clock.now();
    assert!(!queue.drain(TIMEOUT, LONG));
    assert_eq!(queue.0.clock.now() - start, TIMEOUT);
    assert!(!queue.drain(LONG, TIMEOUT));
    assert_eq!(queue.0.clock.now() - start, 2 * TIMEOUT);
    assert!(!queue.drain_once(TIMEOUT));
    assert_eq!(queue.0.clock.now() - start, 2 * TIMEOUT, "the second call must not wait");
}

fn slow(gate: &Gate) -> Box<dyn Clock> {
    Box::new(Hasty { gate: Some(gate.clone()), start: Instant::now(), passed: Mutex::default() })
}

#[test]
fn drain_continues_while_something_is_written() {
    let gate = Gate::default();
    let queue = queue(&gate, slow(&gate));
    (0..10).for_each(|_| queue.push(&[b'x'; PIECE], TIMEOUT));
    let start = queue.0.clock.now();
    assert!(queue.drain(2 * STEP, LONG));
    assert_eq!(queue.0.clock.now() - start, 10 * STEP);
}

/// Clock of a machine that is suspended for a minute at each wait. During this minute the writing thread writes nothing.
struct Stalling(Mutex<Instant>, Arc<Mutex<u32>>);

impl Clock for Stalling {
    fn now(&self) -> Instant {
        *self.0.lock().unwrap()
    }

    fn wait<'a>(&self, _: &Condvar, state: MutexGuard<'a, State>, _: Duration) -> MutexGuard<'a, State> {
        *self.0.lock().unwrap() += Duration::from_secs(60);
        *self.1.lock().unwrap() += 1;
        state
    }
}

#[test]
fn suspended_machine_uses_one_step_of_the_timeout() {
    let waits = Arc::new(Mutex::new(0));
    let gate = Gate::default();
    let queue = queue(&gate, Box::new(Stalling(Mutex::new(Instant::now()), waits.clone())));
    queue.push(b"x", TIMEOUT);
    assert!(!queue.drain(LONG, 20 * STEP));
    assert_eq!(*waits.lock().unwrap(), 20);
}

#[test]
fn drain_ends_at_its_limit_even_if_the_reader_reads() {
    let gate = Gate::default();
    let queue = queue(&gate, slow(&gate));
    (0..10).for_each(|_| queue.push(&[b'x'; PIECE], TIMEOUT));
    let start = queue.0.clock.now();
    assert!(!queue.drain(LONG, 2 * TIMEOUT));
    assert_eq!(queue.0.clock.now() - start, 2 * TIMEOUT);
}

#[test]
fn queued_bytes_are_written_after_the_queue_is_dropped() {
    let (mut reader, writer) = io::pipe().unwrap();
    let queue = QueuedWriter::new("--test", File::from(OwnedFd::from(writer)), 100_000).unwrap();
    // These are more bytes than a pipe can hold.
    queue.push(&bytes(72_000), TIMEOUT);
    drop(queue);
    let mut all = Vec::new();
    reader.read_to_end(&mut all).unwrap();
    assert!(all == bytes(72_000));
}

#[test]
fn closed_pipe_loses_only_the_output() {
    let (reader, writer) = io::pipe().unwrap();
    let shared = Shared::new("--test", LIMIT, PIECE, None, frozen());
    let queue = QueuedWriter::start(shared, Pen::new(File::from(OwnedFd::from(writer)), u64::MAX)).unwrap();
    drop(reader);
    bytes(200_000).chunks(1).for_each(|byte| queue.push(byte, TIMEOUT));
    assert!(queue.drain(LONG, LONG));
    assert_eq!(queue.lost(), 200_000);
}

#[test]
fn non_blocking_pipe_is_waited_for() {
    let (mut reader, writer) = io::pipe().unwrap();
    fcntl_setfl(&writer, fcntl_getfl(&writer).unwrap() | OFlags::NONBLOCK).unwrap();
    let shared = Shared::new("--test", LIMIT, PIECE, None, frozen());
    let queue = QueuedWriter::start(shared, Pen::new(File::from(OwnedFd::from(writer)), u64::MAX)).unwrap();
    let read = thread::spawn(move || {
        let mut all = Vec::new();
        reader.read_to_end(&mut all).unwrap();
        all
    });
    bytes(200_000).chunks(100).for_each(|some| queue.push(some, TIMEOUT));
    assert!(queue.drain(LONG, LONG));
    drop(queue);
    assert!(read.join().unwrap() == bytes(200_000));
}

#[test]
fn lines_without_room_are_dropped_whole_and_reported_in_place() {
    let gate = Gate::default();
    let queue = queue_of_lines(&gate, frozen());
    let line = |number: u32| format!("{number:0>999}\n");
    let taken = (0..100).filter(|number| queue.push_lines(line(*number).as_bytes())).count();
    assert_eq!(taken, 16);
    // A short line would fit into the queue, but the report of the lost lines must precede it. So the line is lost too.
    assert!(!queue.push_lines(b"short\n"));
    assert_eq!(queue.lost(), 85);
    gate.open(u64::MAX);
    // The report is written even if no further line follows.
    let expected: String = (0..16).map(line).chain(["85 lost\n".into()]).collect();
    while gate.bytes().len() < expected.len() {
        thread::yield_now();
    }
    assert!(queue.drain(LONG, LONG));
    assert!(queue.push_lines(b"after\n"));
    assert!(queue.drain(LONG, LONG));
    assert_eq!(String::from_utf8(gate.bytes()).unwrap(), expected + "after\n");
    assert_eq!(queue.lost(), 85);
}

#[test]
fn lines_lost_elsewhere_are_reported_before_the_next_line() {
    let gate = Gate::default();
    gate.open(u64::MAX);
    let queue = queue_of_lines(&gate, frozen());
    queue.add_lost(2);
    assert!(queue.push_lines(b"next\n"));
    assert!(queue.drain(LONG, LONG));
    assert_eq!((gate.bytes(), queue.lost()), (b"2 lost\nnext\n".to_vec(), 2));
}

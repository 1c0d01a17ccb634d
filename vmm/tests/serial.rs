// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests the serial port of a real `carom` process with a small guest. Some readers of the port's output read slowly or not at all.
//!
//! Without access to `/dev/kvm`, these tests do nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod echo_guest;
mod http;
#[expect(dead_code, reason = "shared by tests that start the program in another way")]
mod program;
mod tiny_guest;

use std::fs::{File, OpenOptions};
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, Mode, mknodat};
use rustix::pipe::fcntl_setpipe_size;

use echo_guest::ECHO;
use http::LIMIT;
use program::{call, command, has_kvm, wait_until};
use tiny_guest::elf;

/// `mov dx, 0x3f8; mov al, 'A'; again: out dx, al; jmp again`
const WRITE_FOR_EVER: &[u8] = &[0x66, 0xba, 0xf8, 0x03, 0xb0, b'A', 0xee, 0xeb, 0xfd];
/// Number of bytes that [`write_and_power_off`] writes: more than a small pipe and all queues hold.
const LEN: u32 = 100_000;

/// Returns code that writes the lowest byte of each number from [`LEN`] down to 1, and powers off.
fn write_and_power_off() -> Vec<u8> {
    // mov dx, 0x3f8; mov ecx, LEN
    let mut code = vec![0x66, 0xba, 0xf8, 0x03, 0xb9];
    code.extend(LEN.to_le_bytes());
    // again: mov al, cl; out dx, al; loop again
    code.extend([0x88, 0xc8, 0xee, 0xe2, 0xfb]);
    // mov dx, 0x600 (sleep control); mov al, 0x34 (S5); out dx, al; hlt
    code.extend([0x66, 0xba, 0x00, 0x06, 0xb0, 0x34, 0xee, 0xf4]);
    code
}

/// Returns the bytes that [`write_and_power_off`] writes.
fn written() -> Vec<u8> {
    (1..=LEN).rev().map(|number| number.to_le_bytes()[0]).collect()
}

/// Program with a guest.
struct Carom {
    process: program::Carom,
    dir: tempfile::TempDir,
}

impl Carom {
    /// Starts a guest with `code`. `serial` returns the serial option's value for the test's directory.
    fn start(code: &[u8], serial: impl FnOnce(&Path) -> String, stdout: Stdio, stderr: Stdio) -> Option<Self> {
        if !has_kvm() {
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("kernel"), elf(code)).unwrap();
        let mut command = command(dir.path(), &["--memory", "size=64M", "--serial", &serial(dir.path()), "--kernel"]);
        let child = command.arg(dir.path().join("kernel")).stdout(stdout).stderr(stderr).spawn().unwrap();
        Some(Self { process: program::Carom(child), dir })
    }

    /// Waits until the VM runs. Returns the configuration of the serial port from `vm.info`.
    fn serial(&self) -> serde_json::Value {
        let mut info = serde_json::Value::Null;
        wait_until("the VM runs", || {
            let listens = UnixStream::connect(self.dir.path().join("api.sock")).is_ok();
            info = if listens { call(self.dir.path(), "GET", "vm.info", None).1 } else { info.take() };
            info["state"] == "Running"
        });
        info["config"]["serial"].take()
    }

    /// Waits until the program has dropped some of the guest's output, because the reader of the output reads nothing.
    fn loses_output(&self) {
        self.serial();
        wait_until("the guest's output is dropped", || {
            call(self.dir.path(), "GET", "vm.counters", None).1["_serial"]["lost_bytes"].as_u64() > Some(0)
        });
    }

    /// Waits until the process ends. Returns its exit status and its standard error.
    fn wait(&mut self) -> (Option<i32>, String) {
        let status = self.process.ended();
        (status.code(), self.said())
    }

    /// Ends the process with SIGTERM. Returns its exit status and its standard error.
    fn terminate(&mut self) -> (Option<i32>, String) {
        let status = self.process.terminate();
        (status.code(), self.said())
    }

    fn said(&mut self) -> String {
        let mut said = String::new();
        if let Some(mut stderr) = self.process.0.stderr.take() {
            stderr.read_to_string(&mut said).unwrap();
        }
        said
    }
}

fn make_fifo(dir: &Path) -> PathBuf {
    let path = dir.join("fifo");
    mknodat(CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    path
}

/// Returns a pipe that fills quickly.
fn small_pipe() -> (PipeReader, PipeWriter) {
    let (reader, writer) = io::pipe().unwrap();
    fcntl_setpipe_size(&writer, 4096).unwrap();
    (reader, writer)
}

/// Opens the reading end of a FIFO that fills quickly, without waiting for a writer.
fn open_reader(fifo: &Path) -> File {
    let reader = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(fifo).unwrap();
    fcntl_setpipe_size(&reader, 4096).unwrap();
    reader
}

/// Reads until `len` bytes have arrived or the writer has closed its end. Reads a page at a time with pauses, so more
/// slowly than a guest writes.
fn read_slowly(mut reader: impl Read, len: usize) -> Vec<u8> {
    let mut all = Vec::new();
    let mut page = [0; 4096];
    let start = Instant::now();
    while all.len() < len {
        assert!(start.elapsed() < LIMIT, "{} bytes came", all.len());
        match reader.read(&mut page) {
            Ok(0) => break,
            Ok(read) => all.extend_from_slice(&page[..read]),
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}"),
        }
        thread::sleep(Duration::from_millis(100));
    }
    all
}

#[test]
fn standard_output_without_a_reader_does_not_delay_the_end() {
    let (mut reader, writer) = small_pipe();
    let Some(mut carom) = Carom::start(WRITE_FOR_EVER, |_| "tty".into(), writer.into(), Stdio::piped()) else { return };
    // After this read, the guest runs. It continues to write when the pipe and the queue are full.
    reader.read_exact(&mut [0]).unwrap();
    carom.loses_output();

    let (status, said) = carom.terminate();

    assert_eq!(status, Some(0), "{said}");
    assert!(
        said.contains("--serial: the guest's last output is lost, because it could not be written in time"),
        "{said}"
    );
}

#[test]
fn standard_error_of_the_same_pipe_does_not_delay_the_end() {
    let (mut reader, writer) = small_pipe();
    let stderr = writer.try_clone().unwrap().into();
    let Some(mut carom) = Carom::start(WRITE_FOR_EVER, |_| "tty".into(), writer.into(), stderr) else { return };
    reader.read_exact(&mut [0]).unwrap();
    carom.loses_output();

    assert_eq!(carom.terminate().0, Some(0));
}

#[test]
fn slow_reader_of_standard_output_gets_all_before_the_end() {
    let (reader, writer) = small_pipe();
    let Some(mut carom) = Carom::start(&write_and_power_off(), |_| "tty".into(), writer.into(), Stdio::piped()) else {
        return;
    };

    let read = read_slowly(reader, usize::MAX);

    assert!(read == written(), "{} of {LEN} bytes", read.len());
    assert_eq!(carom.wait(), (Some(0), String::new()));
}

#[test]
fn fifo_reader_that_stops_does_not_delay_the_end() {
    let mut reader = None;
    let serial = |dir: &Path| {
        let fifo = make_fifo(dir);
        reader = Some(open_reader(&fifo));
        format!("file={}", fifo.display())
    };
    let Some(mut carom) = Carom::start(WRITE_FOR_EVER, serial, Stdio::null(), Stdio::piped()) else { return };
    let start = Instant::now();
    // Until the program opens the FIFO for writing, reading returns the end of the file.
    while read_slowly(reader.as_ref().unwrap(), 1).is_empty() {
        assert!(start.elapsed() < LIMIT, "nothing came");
    }
    carom.loses_output();

    assert_eq!(carom.terminate().0, Some(0));
}

#[test]
fn fifo_without_a_reader_is_refused() {
    let serial = |dir: &Path| format!("file={}", make_fifo(dir).display());
    let Some(mut carom) = Carom::start(WRITE_FOR_EVER, serial, Stdio::null(), Stdio::piped()) else { return };

    let (status, said) = carom.wait();

    let fifo = carom.dir.path().join("fifo");
    let expected = format!("carom: --serial {}: the FIFO has no reader; start the reader first\n", fifo.display());
    assert_eq!((status, said), (Some(2), expected));
}

#[test]
fn regular_file_holds_what_the_guest_wrote_and_nothing_else() {
    let mut path = PathBuf::new();
    let serial = |dir: &Path| {
        path = dir.join("log");
        File::create(&path).unwrap().write_all(&[b'z'; 2 * LEN as usize]).unwrap();
        format!("file={}", path.display())
    };
    let Some(mut carom) = Carom::start(&write_and_power_off(), serial, Stdio::null(), Stdio::piped()) else { return };

    assert_eq!(carom.wait(), (Some(0), String::new()));
    assert!(std::fs::read(path).unwrap() == written());
}

#[test]
fn serial_socket_client_exchanges_bytes_with_the_guest() {
    let socket = |dir: &Path| format!("socket={}", dir.join("serial.sock").display());
    let Some(mut carom) = Carom::start(ECHO, socket, Stdio::null(), Stdio::piped()) else { return };
    let path = carom.dir.path().join("serial.sock");
    let serial = carom.serial();
    assert_eq!((&serial["mode"], &serial["socket"]), (&"Socket".into(), &path.display().to_string().into()));
    for text in [b"first client", b"other client"] {
        let mut client = http::connect(&path);
        client.write_all(text).unwrap();
        let mut echo = [0; 12];
        client.read_exact(&mut echo).unwrap();
        assert_eq!(&echo, text);
    }
    assert_eq!(carom.terminate(), (Some(0), String::new()));
    assert!(!path.exists());
}

#[test]
fn reported_pseudoterminal_exchanges_bytes_with_the_guest() {
    let Some(mut carom) = Carom::start(ECHO, |_| "pty".into(), Stdio::null(), Stdio::piped()) else { return };
    let serial = carom.serial();
    assert_eq!(serial["mode"], "Pty");
    let path = serial["file"].as_str().unwrap();
    let mut pty = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOCTTY).open(path).unwrap();
    pty.write_all(b"a\rb\x03c").unwrap();
    let mut echo = [0; 5];
    pty.read_exact(&mut echo).unwrap();
    assert_eq!(&echo, b"a\rb\x03c");
    assert_eq!(carom.terminate(), (Some(0), String::new()));
}

#[test]
fn socket_that_cannot_be_created_is_refused() {
    let socket = |dir: &Path| format!("socket={}/no/serial.sock", dir.display());
    let Some(mut carom) = Carom::start(ECHO, socket, Stdio::null(), Stdio::piped()) else { return };
    let (status, said) = carom.wait();
    assert_eq!(status, Some(2), "{said}");
    assert!(said.starts_with("carom: --serial /") && said.contains("serial.sock: No such file or directory"), "{said}");
}

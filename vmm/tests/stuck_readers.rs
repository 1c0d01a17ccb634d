// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests a real `carom` process whose log, events, reports or console output are written to a full pipe. The reader of the pipe reads
//! nothing, or reads late. Clients are still served, and SIGTERM ends the process.
//!
//! Without access to `/dev/kvm`, these tests do nothing.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod echo_guest;
mod http;
#[expect(dead_code, reason = "shared by tests that start the program in another way")]
mod program;
mod tiny_guest;

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, PipeReader, PipeWriter, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::fs::{CWD, FileType, Mode, OFlags, fcntl_getfl, fcntl_setfl, mknodat};
use rustix::pipe::fcntl_setpipe_size;
use rustix::process::{Pid, Signal, kill_process};

use echo_guest::ECHO;
use program::{Carom, call, command, has_kvm, start_by, wait_until};
use tiny_guest::elf;

/// Fills the pipe of `writer`. Returns its writing end and the number of bytes in it.
fn fill(writer: impl Into<OwnedFd>) -> (File, usize) {
    let mut writer = File::from(writer.into());
    fcntl_setpipe_size(&writer, 4096).unwrap();
    let flags = fcntl_getfl(&writer).unwrap();
    fcntl_setfl(&writer, flags | OFlags::NONBLOCK).unwrap();
    let mut filled = 0;
    while writer.write(b"x").is_ok() {
        filled += 1;
    }
    fcntl_setfl(&writer, flags - OFlags::NONBLOCK).unwrap();
    (writer, filled)
}

fn full_pipe() -> (PipeReader, File, usize) {
    let (reader, writer): (PipeReader, PipeWriter) = io::pipe().unwrap();
    let (writer, filled) = fill(writer);
    (reader, writer, filled)
}

/// Creates a full FIFO in `dir`. Returns its reading end, a writing end, and the number of bytes in it.
fn full_fifo(dir: &Path) -> (File, File, usize) {
    let path = dir.join("fifo");
    mknodat(CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    let reader = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path).unwrap();
    let (writer, filled) = fill(OpenOptions::new().write(true).open(&path).unwrap());
    fcntl_setfl(&reader, fcntl_getfl(&reader).unwrap() - OFlags::NONBLOCK).unwrap();
    (reader, writer, filled)
}

/// Starts the program, which logs each API call.
fn start(dir: &Path, options: &[&str], stderr: Stdio) -> Option<Carom> {
    let mut command = command(dir, options);
    command.arg("-vv").stdout(Stdio::null()).stderr(stderr);
    has_kvm().then(|| start_by(command, dir))
}

fn ping(dir: &Path) {
    assert_eq!(call(dir, "GET", "vmm.ping", None).0, 200);
}

/// Returns a counter of the program from its metrics.
fn metric(dir: &Path, name: &str) -> u64 {
    let mut stream = http::connect(&dir.join("api.sock"));
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let (status, body) = http::receive(&mut BufReader::new(stream));
    assert_eq!(status, 200);
    let text = String::from_utf8(body).unwrap();
    text.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().parse().unwrap()
}

/// Calls the API until the log has lost lines. Each call adds a line with its path. Returns the number of lost lines.
fn lose_lines(dir: &Path) -> u64 {
    let name = "x".repeat(4000);
    let mut calls = 0;
    while metric(dir, "carom_lost_log_lines_total ") == 0 {
        assert_eq!(call(dir, "GET", &name, None).0, 404);
        calls += 1;
        assert!(calls < 1000, "nothing is lost");
    }
    (0..10).for_each(|_| ping(dir));
    metric(dir, "carom_lost_log_lines_total ")
}

/// Returns the number of dropped lines that a line of the log reports.
fn reported(line: &str) -> Option<u64> {
    let (before, _) = line.split_once(" lines dropped: ")?;
    before.rsplit(' ').next()?.parse().ok()
}

/// Reads a full log until the log reports at least `lost` dropped lines. Checks that later lines follow.
fn read_on(dir: &Path, mut reader: impl Read, filled: usize, lost: u64) {
    reader.read_exact(&mut vec![0; filled]).unwrap();
    let mut lines = BufReader::new(reader).lines();
    let count = lines.find_map(|line| reported(&line.unwrap())).unwrap();
    assert!(count >= lost, "{count} of {lost}");
    assert_eq!(metric(dir, "carom_lost_log_lines_total "), count);
    assert_eq!(call(dir, "GET", "after-it", None).0, 404);
    assert!(lines.any(|line| line.unwrap().contains("after-it")));
}

#[test]
fn full_standard_error_delays_neither_clients_nor_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let (_reader, writer, _) = full_pipe();
    let Some(mut carom) = start(dir.path(), &[], writer.into()) else { return };
    (0..200).for_each(|_| ping(dir.path()));
    assert_eq!(carom.terminate().code(), Some(0));
}

#[test]
fn dropped_lines_of_standard_error_are_counted_and_reported() {
    let dir = tempfile::tempdir().unwrap();
    let (reader, writer, filled) = full_pipe();
    let Some(mut carom) = start(dir.path(), &[], writer.into()) else { return };
    let lost = lose_lines(dir.path());
    read_on(dir.path(), reader, filled, lost);
    // The program also continues if the pipe has no reader any more.
    ping(dir.path());
    assert_eq!(carom.terminate().code(), Some(0));
}

#[test]
fn full_log_file_delays_neither_clients_nor_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let (reader, _writer, filled) = full_fifo(dir.path());
    let fifo = dir.path().join("fifo");
    let Some(mut carom) = start(dir.path(), &["--log-file", fifo.to_str().unwrap()], Stdio::null()) else { return };
    let lost = lose_lines(dir.path());
    read_on(dir.path(), reader.try_clone().unwrap(), filled, lost);
    assert_eq!(carom.terminate().code(), Some(0));
}

#[test]
fn last_lines_reach_a_connected_reader() {
    let dir = tempfile::tempdir().unwrap();
    let (mut reader, writer) = io::pipe().unwrap();
    let Some(mut carom) = start(dir.path(), &[], writer.into()) else { return };
    kill_process(Pid::from_child(&carom.0), Signal::TERM).unwrap();
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    assert!(text.contains("signal 15 ends the VMM"), "{text}");
    assert_eq!(carom.ended().code(), Some(0));
}

#[test]
fn full_event_stream_delays_neither_clients_nor_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let (_reader, _writer, _) = full_fifo(dir.path());
    let monitor = format!("path={}", dir.path().join("fifo").display());
    let Some(mut carom) = start(dir.path(), &["--event-monitor", &monitor], Stdio::null()) else { return };
    (0..10).for_each(|_| ping(dir.path()));
    assert_eq!(carom.terminate().code(), Some(0));
}

#[test]
fn full_crash_report_pipe_does_not_block_process_exit() {
    let dir = tempfile::tempdir().unwrap();
    let (_reader, _writer, _) = full_fifo(dir.path());
    let report = format!("path={}", dir.path().join("fifo").display());
    let Some(mut carom) = start(dir.path(), &["--crash-report", &report], Stdio::null()) else { return };
    ping(dir.path());
    kill_process(Pid::from_child(&carom.0), Signal::SEGV).unwrap();
    assert_eq!(carom.ended().signal(), Some(libc::SIGSEGV));
}

#[test]
fn full_console_file_delays_neither_clients_nor_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (mut reader, _writer, filled) = full_fifo(dir);
    // `mov dx, 0x3f8; mov al, 'A'; again: out dx, al; jmp again`
    fs::write(dir.join("kernel"), elf(&[0x66, 0xba, 0xf8, 0x03, 0xb0, b'A', 0xee, 0xeb, 0xfd])).unwrap();
    let (kernel, serial) = (dir.join("kernel"), format!("file={}", dir.join("fifo").display()));
    let options = ["--kernel", kernel.to_str().unwrap(), "--memory", "size=64M", "--serial", &serial];
    let Some(mut carom) = start(dir, &options, Stdio::null()) else { return };
    let lost = || call(dir, "GET", "vm.counters", None).1["_serial"]["lost_bytes"].as_u64().unwrap_or(0);
    wait_until("output is lost", || lost() > 0);
    (0..10).for_each(|_| ping(dir));
    // The reader gets the oldest bytes first: the bytes that filled the FIFO, then the guest's output.
    reader.read_exact(&mut vec![0; filled]).unwrap();
    let mut waited = [0; 4096];
    reader.read_exact(&mut waited).unwrap();
    assert_eq!(waited, [b'A'; 4096]);
    assert_eq!(carom.terminate().code(), Some(0));
}

#[test]
fn failure_is_reported_and_ends_the_program_without_a_reader() {
    let program = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_carom"));
        command.args(["--kernel", "/no/such", "--memory", "size=64M"]).stdin(Stdio::null()).stdout(Stdio::null());
        command
    };
    let heard = program().output().unwrap();
    let said = String::from_utf8(heard.stderr).unwrap();
    if said.contains("/dev/kvm") {
        return;
    }
    assert!(heard.status.code() == Some(2) && said.starts_with("carom: --kernel /no/such: "), "{said}");
    let (_reader, writer, _) = full_pipe();
    let mut unheard = Carom(program().stderr(writer).spawn().unwrap());
    assert_eq!(unheard.ended().code(), Some(2));
}

#[test]
fn running_guest_is_not_delayed_by_the_log() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("kernel"), elf(ECHO)).unwrap();
    let (_reader, writer, _) = full_pipe();
    let (kernel, serial) = (dir.join("kernel"), format!("socket={}", dir.join("serial").display()));
    let options = ["--kernel", kernel.to_str().unwrap(), "--memory", "size=64M", "--serial", &serial];
    let Some(mut carom) = start(dir, &options, writer.into()) else { return };
    wait_until("the serial port's socket listens", || UnixStream::connect(dir.join("serial")).is_ok());
    let mut client = http::connect(&dir.join("serial"));
    for _ in 0..10 {
        ping(dir);
        client.write_all(b"?").unwrap();
        client.read_exact(&mut [0]).unwrap();
    }
    assert_eq!(carom.terminate().code(), Some(0));
}

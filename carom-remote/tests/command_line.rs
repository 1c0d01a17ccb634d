// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Tests of error messages and the exit status. An error message is one line that names the mistake.

#![expect(clippy::unwrap_used, reason = "a test may panic")]

use std::fs::File;
use std::io::{Read, Write, pipe};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::time::Duration;

/// Runs the program. Returns its exit status, standard output and standard error.
fn run(arguments: &[&str]) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_carom-remote"));
    let output = command.args(arguments).env_remove("CAROM_API_SOCKET").output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn mistakes_are_one_line_with_status_2() {
    for (arguments, part) in [
        (&["resiz"][..], "resiz"),
        (&["ping", "--colour"], "--colour"),
        (&["info"], "--api-socket is needed"),
        (&["--api-socket", "", "info"], "--api-socket"),
        (&["add-device", "iommu=on"], "--device: 'path=' is required"),
        (&["remove-device"], "<ID>"),
        (&["resize", "--memory", "1Q"], "--memory"),
        (&["resize-disk", "--disk", "_disk0"], "--size"),
        (&["resize-disk", "--disk", "_disk0", "--size", "1Q"], "--size"),
        (&["iommu-bounce", "--threshold", "x"], "--threshold"),
        (&["iommu-bounce", "--threshold-write", "5G"], "--threshold-write"),
    ] {
        let (status, output, said) = run(arguments);
        assert_eq!((status, output.as_str()), (2, ""), "{arguments:?}: {said}");
        assert!(said.starts_with("carom-remote: ") && said.contains(part) && said.lines().count() == 1, "{said}");
    }
}

#[test]
fn missing_socket_is_a_failure_in_each_spelling() {
    for socket in ["/no/such/socket", "path=/no/such/socket"] {
        let (status, _, said) = run(&["--api-socket", socket, "ping"]);
        assert_eq!(status, 1, "{said}");
        assert!(said.starts_with("carom-remote: --api-socket /no/such/socket: "), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

#[test]
fn help_names_every_verb_of_the_documentation() {
    let (status, help, _) = run(&["--help"]);
    assert_eq!(status, 0);
    let documented = include_str!("../../docs/remote.md");
    let verbs: Vec<&str> = help.lines().filter_map(|line| line.strip_prefix("  ")?.split(' ').next()).collect();
    let verbs: Vec<&str> = verbs.into_iter().filter(|verb| !verb.is_empty() && !verb.starts_with('-')).collect();
    assert!(verbs.len() >= 20, "{verbs:?}");
    for verb in verbs.into_iter().filter(|verb| *verb != "help") {
        assert!(documented.contains(verb), "{verb} is not in docs/remote.md");
    }
}

/// Runs the program with these output streams. Returns its exit status.
fn status(arguments: &[&str], stdout: impl Into<Stdio>, stderr: impl Into<Stdio>) -> Option<i32> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_carom-remote"));
    command.args(arguments).env_remove("CAROM_API_SOCKET").stdout(stdout).stderr(stderr).status().unwrap().code()
}

#[test]
fn status_does_not_depend_on_the_reader_of_the_output() {
    let closed = || OwnedFd::from(pipe().unwrap().1);
    let full = || OwnedFd::from(File::options().write(true).open("/dev/full").unwrap());
    for asked in [&["--help"][..], &["--version"], &["help", "info"], &["completions", "bash"]] {
        assert_eq!(status(asked, closed(), Stdio::null()), Some(0), "{asked:?}, no reader");
        assert_eq!(status(asked, full(), Stdio::null()), Some(1), "{asked:?}, full");
        assert_eq!(status(asked, full(), full()), Some(1), "{asked:?}, both full");
    }
    for mistake in [&["--colour"][..], &[], &["resize"], &["info"], &["add-disk", "path="]] {
        for stderr in [closed(), full()] {
            assert_eq!(status(mistake, Stdio::null(), stderr), Some(2), "{mistake:?}");
        }
    }
    let failure = ["--api-socket", "/no/such/socket", "ping"];
    for stderr in [closed(), full()] {
        assert_eq!(status(&failure, Stdio::null(), stderr), Some(1));
    }
}

#[test]
fn output_beyond_the_limit_on_files_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let file = File::create(dir.path().join("output")).unwrap();
    let program = env!("CARGO_BIN_EXE_carom-remote");
    let limited = format!("ulimit -f 1; exec {program} completions bash");
    let output = Command::new("sh").args(["-c", &limited]).stdout(file).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{:?}: {said}", output.status);
    assert!(said.starts_with("carom-remote: ") && said.contains("File too large"), "{said}");
}

#[test]
fn stopped_reader_blocks_neither_connection_nor_signal() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("api.sock");
    let server = UnixListener::bind(&socket).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_carom-remote"));
    let mut client = command.arg("--api-socket").arg(&socket).arg("openapi").stdout(Stdio::piped()).spawn().unwrap();
    let (mut stream, _) = server.accept().unwrap();
    // With a time limit on reads, the test fails instead of hanging.
    stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let mut request = Vec::new();
    while !request.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        request.extend(byte);
    }
    // The body has more bytes than fit in a pipe.
    let body = "x".repeat(1 << 20);
    write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
    assert_eq!(stream.read(&mut [0]).unwrap(), 0, "the connection stays open");
    // The client's output exceeds the pipe, so the client now waits until the test reads more.
    client.stdout.as_mut().unwrap().read_exact(&mut [0; 100]).unwrap();
    assert!(client.try_wait().unwrap().is_none());
    let killed = Command::new("sh").args(["-c", &format!("kill -TERM {}", client.id())]).status().unwrap();
    assert!(killed.success());
    assert_eq!(client.wait().unwrap().signal(), Some(15));
}

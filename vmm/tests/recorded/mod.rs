// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Records requests of other projects' clients, and sends recorded requests again.

#[path = "../echo_guest/mod.rs"]
pub(crate) mod echo_guest;
#[path = "../http/mod.rs"]
pub(crate) mod http;
#[path = "../program/mod.rs"]
#[expect(dead_code, reason = "shared by tests that make their own requests")]
mod program;
#[path = "../tiny_guest/mod.rs"]
pub(crate) mod tiny_guest;

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use echo_guest::ECHO;
use http::LIMIT;
use program::{Carom, has_kvm};

/// VMM that starts without a VM, and the directory with its files. The directory's name has the same length as its placeholder in recorded
/// requests.
pub(crate) struct Vmm {
    process: Carom,
    dir: tempfile::TempDir,
    /// Placeholder of the directory in recorded requests. It ends with `XXXXXX` in place of the six random letters.
    recorded: &'static str,
}

impl Vmm {
    /// Starts a VMM in a new directory. The file `kernel` in the directory is a small guest, and `prepare` creates further files.
    /// Returns `None` without access to `/dev/kvm`.
    pub(crate) fn start(program: &OsStr, recorded: &'static str, prepare: impl FnOnce(&Path)) -> Option<Self> {
        if !has_kvm() {
            return None;
        }
        let prefix = recorded.strip_prefix("/tmp/").and_then(|name| name.strip_suffix("XXXXXX")).unwrap();
        let dir = tempfile::Builder::new().prefix(prefix).rand_bytes(6).tempdir_in("/tmp").unwrap();
        assert_eq!(dir.path().to_str().unwrap().len(), recorded.len());
        let mut kernel = tiny_guest::elf(ECHO);
        // The kernel is also the image of a disk, which has at least one block.
        kernel.resize(kernel.len().max(512), 0);
        fs::write(dir.path().join("kernel"), kernel).unwrap();
        prepare(dir.path());
        let child = Command::new(program)
            .arg("--api-socket")
            .arg(dir.path().join("api.sock"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let vmm = Self { process: Carom(child), dir, recorded };
        vmm.connect();
        Some(vmm)
    }

    /// Returns the path of a file in the directory.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Waits until the VMM listens, and connects to it.
    pub(crate) fn connect(&self) -> UnixStream {
        let start = Instant::now();
        loop {
            match UnixStream::connect(self.path("api.sock")) {
                Ok(stream) => {
                    stream.set_read_timeout(Some(LIMIT)).unwrap();
                    return stream;
                }
                Err(error) => assert!(start.elapsed() < LIMIT, "{error}"),
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Replaces the test's directory with its placeholder.
    pub(crate) fn anywhere(&self, text: &str) -> String {
        text.replace(self.dir.path().to_str().unwrap(), self.recorded)
    }

    /// Replaces the placeholder with the test's directory.
    pub(crate) fn here(&self, text: &str) -> String {
        text.replace(self.recorded, self.dir.path().to_str().unwrap())
    }

    /// Sends a recorded request. Returns the answer's status and body.
    pub(crate) fn replay(&self, record: &Path) -> (u16, String) {
        let request = fs::read_to_string(record).unwrap();
        let mut stream = self.connect();
        // Head and body are sent separately, as the clients send them.
        let (head, body) = request.split_once("\r\n\r\n").unwrap();
        stream.write_all(format!("{}\r\n\r\n", self.here(head)).as_bytes()).unwrap();
        stream.write_all(self.here(body).as_bytes()).unwrap();
        let (status, body) = http::receive(&mut BufReader::new(stream));
        (status, String::from_utf8(body).unwrap())
    }

    /// Sends a recorded request. The answer must have this status, and contain all of `says`.
    pub(crate) fn answers(&self, record: &Path, wanted: u16, says: &[&str]) {
        let (status, body) = self.replay(record);
        assert_eq!(status, wanted, "{}: {body}", record.display());
        assert!(says.iter().all(|part| body.contains(part)), "{}: {body}", record.display());
    }

    /// Waits until the VMM has ended.
    pub(crate) fn wait(mut self) {
        self.process.ended();
    }
}

/// Returns the client that an environment variable names. Without the variable, prints that `what` is not tested.
pub(crate) fn client(variable: &str, what: &str) -> Option<OsString> {
    let client = env::var_os(variable).filter(|client| !client.is_empty());
    if client.is_none() {
        eprintln!("not tested: {variable} does not name {what}");
    }
    client
}

/// Checks that a client sent the request that is recorded in `file`. With `CAROM_BLESS=1`, records the request.
pub(crate) fn check_sent(file: &Path, sent: &str) {
    if env::var_os("CAROM_BLESS").is_some() {
        fs::write(file, sent).unwrap();
    }
    assert_eq!(fs::read_to_string(file).unwrap(), sent, "{}", file.display());
}

/// Reads some bytes. Returns 0 at the end. Retries if the process was stopped and continued meanwhile.
fn read_some(stream: &mut UnixStream, bytes: &mut [u8]) -> usize {
    loop {
        match stream.read(bytes) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            read => return read.unwrap_or(0),
        }
    }
}

/// Forwards one connection from `listener` to the VMM. Returns the bytes that the client sent. The client closes the connection when
/// it has its answer.
pub(crate) fn pass_on(listener: &UnixListener, vmm: &Vmm) -> String {
    let (mut client, _) = listener.accept().unwrap();
    let server = vmm.connect();
    let mut answers = server.try_clone().unwrap();
    let mut to_client = client.try_clone().unwrap();
    let back = thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let len @ 1.. = read_some(&mut answers, &mut bytes) {
            if to_client.write_all(&bytes[..len]).is_err() {
                break;
            }
        }
    });
    let mut sent = Vec::new();
    let mut bytes = [0; 4096];
    while let len @ 1.. = read_some(&mut client, &mut bytes) {
        sent.extend_from_slice(&bytes[..len]);
        (&server).write_all(&bytes[..len]).unwrap();
    }
    let _ = server.shutdown(Shutdown::Both);
    back.join().unwrap();
    String::from_utf8(sent).unwrap()
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Requests of clients of others, which were recorded and are sent again.

use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::io::{BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::echo_guest::ECHO;
use crate::http::{self, PATIENCE};
use crate::tiny_guest;

/// A VMM without a VM, in a directory whose name has the length of the one that stands for it in recorded requests.
pub(crate) struct Vmm {
    child: Child,
    dir: tempfile::TempDir,
    /// What stands for it: it ends with six letters for those that are random.
    recorded: &'static str,
}

impl Vmm {
    /// Starts one in a new directory, in which `kernel` is a guest of a few instructions and `prepare` puts more. `None` where there
    /// is no `/dev/kvm` that this process may use.
    pub(crate) fn start(program: &OsStr, recorded: &'static str, prepare: impl FnOnce(&Path)) -> Option<Self> {
        if let Err(error) = OpenOptions::new().read(true).write(true).open("/dev/kvm") {
            eprintln!("not tested: /dev/kvm: {error}");
            return None;
        }
        let prefix = recorded.strip_prefix("/tmp/").and_then(|name| name.strip_suffix("XXXXXX")).unwrap();
        let dir = tempfile::Builder::new().prefix(prefix).rand_bytes(6).tempdir_in("/tmp").unwrap();
        assert_eq!(dir.path().to_str().unwrap().len(), recorded.len());
        let mut kernel = tiny_guest::elf(ECHO);
        // It is the image of a disk too, which has a block at least.
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
        let vmm = Self { child, dir, recorded };
        vmm.connect();
        Some(vmm)
    }

    /// A file in its directory.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Connects to it, which may take it a moment.
    pub(crate) fn connect(&self) -> UnixStream {
        let start = Instant::now();
        loop {
            match UnixStream::connect(self.path("api.sock")) {
                Ok(stream) => {
                    stream.set_read_timeout(Some(PATIENCE)).unwrap();
                    return stream;
                }
                Err(error) => assert!(start.elapsed() < PATIENCE, "{error}"),
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// What is written with the test's directory in it, as it is in any other run.
    pub(crate) fn anywhere(&self, text: &str) -> String {
        text.replace(self.dir.path().to_str().unwrap(), self.recorded)
    }

    /// The opposite.
    pub(crate) fn here(&self, text: &str) -> String {
        text.replace(self.recorded, self.dir.path().to_str().unwrap())
    }

    /// Sends a request as it was recorded; returns the answer's status and body.
    pub(crate) fn replay(&self, record: &Path) -> (u16, String) {
        let request = fs::read_to_string(record).unwrap();
        let mut stream = self.connect();
        // As the clients do it: head and body apart.
        let (head, body) = request.split_once("\r\n\r\n").unwrap();
        stream.write_all(format!("{}\r\n\r\n", self.here(head)).as_bytes()).unwrap();
        stream.write_all(self.here(body).as_bytes()).unwrap();
        let (status, body) = http::receive(&mut BufReader::new(stream));
        (status, String::from_utf8(body).unwrap())
    }

    /// Waits until it has ended.
    pub(crate) fn wait(mut self) {
        let start = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < PATIENCE, "it does not end");
            thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Passes one connection on from `listener` to the VMM, and returns what the client sent. The client closes it when it has its
/// answer.
pub(crate) fn pass_on(listener: &UnixListener, vmm: &Vmm) -> String {
    let (mut client, _) = listener.accept().unwrap();
    let server = vmm.connect();
    let mut answers = server.try_clone().unwrap();
    let mut to_client = client.try_clone().unwrap();
    let back = thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(len @ 1..) = answers.read(&mut bytes) {
            if to_client.write_all(&bytes[..len]).is_err() {
                break;
            }
        }
    });
    let mut sent = Vec::new();
    let mut bytes = [0; 4096];
    while let Ok(len @ 1..) = client.read(&mut bytes) {
        sent.extend_from_slice(&bytes[..len]);
        (&server).write_all(&bytes[..len]).unwrap();
    }
    let _ = server.shutdown(Shutdown::Both);
    back.join().unwrap();
    String::from_utf8(sent).unwrap()
}

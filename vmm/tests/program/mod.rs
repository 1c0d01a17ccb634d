// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Starts a real `carom` process that serves its API, and makes calls to the API.

use std::env;
use std::fs::OpenOptions;
use std::io::BufReader;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::http::{self, LIMIT};

/// Process that is killed at the end of the test.
pub(crate) struct Carom(pub(crate) Child);

impl Drop for Carom {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Carom {
    /// Waits until the process has ended.
    pub(crate) fn ended(&mut self) -> ExitStatus {
        wait_until("the process ends", || self.0.try_wait().unwrap().is_some());
        self.0.wait().unwrap()
    }

    /// Ends the process with SIGTERM.
    pub(crate) fn terminate(&mut self) -> ExitStatus {
        kill_process(Pid::from_child(&self.0), Signal::TERM).unwrap();
        self.ended()
    }
}

/// Waits until a condition holds.
pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < LIMIT, "not in time: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// True if this process may use `/dev/kvm`. Otherwise prints that the test does nothing.
pub(crate) fn has_kvm() -> bool {
    let opened = OpenOptions::new().read(true).write(true).open("/dev/kvm");
    opened.inspect_err(|error| eprintln!("not tested: /dev/kvm: {error}")).is_ok()
}

/// Returns the command of the program with a socket `api.sock` in `dir` and further options.
pub(crate) fn command(dir: &Path, options: &[&str]) -> Command {
    let program = env::var_os("CAROM_BIN").unwrap_or_else(|| env!("CARGO_BIN_EXE_carom").into());
    let mut command = Command::new(program);
    command.arg("--api-socket").arg(dir.join("api.sock")).args(options).stdin(Stdio::null());
    command
}

/// Starts `command`, and waits until the process listens at `api.sock` in `dir`.
pub(crate) fn start_by(mut command: Command, dir: &Path) -> Carom {
    let mut carom = Carom(command.spawn().unwrap());
    wait_until("the process listens", || {
        let ended = carom.0.try_wait().unwrap();
        assert!(ended.is_none(), "carom has ended: {ended:?}");
        UnixStream::connect(dir.join("api.sock")).is_ok()
    });
    carom
}

/// Starts the program with a socket `api.sock` in `dir` and further options, if KVM is available.
pub(crate) fn start(dir: &Path, options: &[&str]) -> Option<Carom> {
    has_kvm().then(|| start_by(command(dir, options), dir))
}

/// Makes a call. Returns its status and answer.
pub(crate) fn call(dir: &Path, method: &str, name: &str, body: Option<&Value>) -> (u16, Value) {
    let mut stream = http::connect(&dir.join("api.sock"));
    http::send(&mut stream, method, name, body);
    let (status, body) = http::receive(&mut BufReader::new(stream));
    (status, serde_json::from_slice(&body).unwrap_or_default())
}

/// Makes a call whose answer has no body.
pub(crate) fn put(dir: &Path, name: &str, body: Option<&Value>) {
    let (status, answer) = call(dir, "PUT", name, body);
    assert_eq!(status, 204, "{name}: {answer}");
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! A real `carom` process that serves its API, and calls of it.

use std::env;
use std::fs::OpenOptions;
use std::io::BufReader;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::http::{self, PATIENCE};

/// A process that is gone at the end of the test.
pub(crate) struct Carom(pub(crate) Child);

impl Drop for Carom {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until something is so.
pub(crate) fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "never: {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// Starts the program with a socket `api.sock` in `dir` and further options, if there is KVM.
pub(crate) fn start(dir: &Path, options: &[&str]) -> Option<Carom> {
    start_with_input(dir, options, Stdio::null())
}

/// The same with this standard input.
pub(crate) fn start_with_input(dir: &Path, options: &[&str], input: Stdio) -> Option<Carom> {
    if let Err(error) = OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        eprintln!("not tested: /dev/kvm: {error}");
        return None;
    }
    let socket = dir.join("api.sock");
    let program = env::var_os("CAROM_BIN").unwrap_or_else(|| env!("CARGO_BIN_EXE_carom").into());
    let mut command = Command::new(program);
    let mut carom = Carom(command.arg("--api-socket").arg(&socket).args(options).stdin(input).spawn().unwrap());
    wait_until("it listens", || {
        let ended = carom.0.try_wait().unwrap();
        assert!(ended.is_none(), "carom has ended: {ended:?}");
        UnixStream::connect(&socket).is_ok()
    });
    Some(carom)
}

/// Status and answer of a call.
pub(crate) fn call(dir: &Path, method: &str, name: &str, body: Option<&Value>) -> (u16, Value) {
    let mut stream = http::connect(&dir.join("api.sock"));
    http::send(&mut stream, method, name, body);
    let (status, body) = http::receive(&mut BufReader::new(stream));
    (status, serde_json::from_slice(&body).unwrap_or_default())
}

/// Makes a call that has no answer.
pub(crate) fn put(dir: &Path, name: &str, body: Option<&Value>) {
    let (status, answer) = call(dir, "PUT", name, body);
    assert_eq!(status, 204, "{name}: {answer}");
}

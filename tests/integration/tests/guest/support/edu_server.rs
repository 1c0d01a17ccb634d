// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `edu-server`: a device of another process.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use std::{fs, thread};

/// The server, until it is dropped.
pub(crate) struct EduServer {
    process: Child,
    dir: tempfile::TempDir,
}

impl EduServer {
    pub(crate) fn start(options: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let process = Command::new(env!("CARGO_BIN_EXE_edu-server"))
            .arg("--socket")
            .arg(dir.path().join("socket"))
            .arg("--log")
            .arg(dir.path().join("log"))
            .args(options)
            .stdin(Stdio::null())
            .spawn()
            .expect("the server starts");
        let server = Self { process, dir };
        let start = Instant::now();
        while !server.socket().exists() {
            assert!(start.elapsed() < Duration::from_secs(20), "the server does not listen");
            thread::sleep(Duration::from_millis(20));
        }
        server
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    /// The value of `--user-device`.
    pub(crate) fn option(&self, more: &str) -> String {
        format!("socket={}{more}", self.socket().display())
    }

    /// What it wrote down.
    pub(crate) fn log(&self) -> Vec<String> {
        let text = fs::read_to_string(self.dir.path().join("log")).unwrap();
        text.lines().map(String::from).collect()
    }
}

impl Drop for EduServer {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

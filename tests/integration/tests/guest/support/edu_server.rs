// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `edu-server`: a device in another process.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use carom_tools::children::KilledOnDrop;

use crate::support::server::serve;

/// Server that ends when this value is dropped.
pub(crate) struct EduServer {
    _process: KilledOnDrop,
    dir: tempfile::TempDir,
}

impl EduServer {
    pub(crate) fn start(options: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_edu-server"));
        let [socket, log] = ["socket", "log"].map(|name| dir.path().join(name));
        command.arg("--socket").arg(&socket).arg("--log").arg(&log).args(options).stdin(Stdio::null());
        Self { _process: serve(&mut command, &socket), dir }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    /// Returns the value for `--user-device`.
    pub(crate) fn option(&self, more: &str) -> String {
        format!("socket={}{more}", self.socket().display())
    }

    /// Returns the lines of the server's log.
    pub(crate) fn log(&self) -> Vec<String> {
        let text = fs::read_to_string(self.dir.path().join("log")).unwrap();
        text.lines().map(String::from).collect()
    }
}

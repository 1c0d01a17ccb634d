// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Captures what a test, its threads and its programs write to stdout and stderr.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;

use rustix::io::{dup, fcntl_dupfd_cloexec};
use rustix::stdio::{dup2_stderr, dup2_stdout};

/// Redirection of this process's stdout and stderr to a file, until this value is dropped.
pub(super) struct Capture {
    file: File,
    stdout: OwnedFd,
    stderr: OwnedFd,
}

impl Capture {
    pub(super) fn start() -> io::Result<Self> {
        // Write earlier output to the real stdout.
        io::stdout().flush()?;
        let file = tempfile::tempfile()?;
        let stdout = fcntl_dupfd_cloexec(io::stdout(), 3)?;
        let stderr = fcntl_dupfd_cloexec(io::stderr(), 3)?;
        // stdout and stderr share one file offset, so that their lines stay in order.
        let shared = dup(&file)?;
        dup2_stdout(&shared)?;
        dup2_stderr(&shared)?;
        Ok(Self { file, stdout, stderr })
    }

    /// Restores stdout and stderr, and returns the captured text. Text that cannot be read is lost.
    pub(super) fn end(mut self) -> String {
        let _ = io::stdout().flush();
        self.restore();
        let mut bytes = Vec::new();
        let _ = self.file.seek(SeekFrom::Start(0)).and_then(|_| self.file.read_to_end(&mut bytes));
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn restore(&self) {
        // All descriptors are open, so this does not fail.
        let _ = dup2_stdout(&self.stdout);
        let _ = dup2_stderr(&self.stderr);
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.restore();
    }
}

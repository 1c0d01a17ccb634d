// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Functions that write to standard output and standard error. If a write fails, these functions do not panic, so the program still returns
//! its exit status.

use std::io::{self, Write};
use std::process::ExitCode;

/// Exit status of a program that cannot write its output.
const FAILURE: u8 = 1;

/// Writes `bytes` to standard output.
///
/// # Errors
/// Standard output is closed or full.
pub fn print(bytes: &[u8]) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(bytes).and_then(|()| stdout.flush())
}

/// Writes the line `program: text` to standard error. If the write fails, the line is lost.
pub fn complain(program: &str, text: &str) {
    // A failed write to standard error cannot be reported anywhere.
    let _ = io::stderr().write_all(format!("{program}: {text}\n").as_bytes());
}

/// Prints the help or version text that the user requested. Returns failure if the write fails, except if the reader has closed the pipe.
pub fn inform(program: &str, text: &str) -> ExitCode {
    match print(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            complain(program, &format!("cannot write to standard output: {error}"));
            ExitCode::from(FAILURE)
        }
        _ => ExitCode::SUCCESS,
    }
}

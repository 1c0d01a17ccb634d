// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Writing to standard output and standard error. If they are closed or full, the exit status still reports the outcome.

use std::io::{self, Write};
use std::process::ExitCode;

/// Exit status of a program that cannot write what it was asked for.
const FAILURE: u8 = 1;

/// Writes `bytes` to standard output.
///
/// # Errors
/// Standard output is closed or full.
pub fn print(bytes: &[u8]) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(bytes).and_then(|()| stdout.flush())
}

/// Writes a line to standard error as one piece. A line without a reader is dropped.
pub fn complain(program: &str, text: &str) {
    // There is no other place to report the failure.
    let _ = io::stderr().write_all(format!("{program}: {text}\n").as_bytes());
}

/// Prints the help or the version that the user asked for. It is no failure if the reader closes the pipe.
pub fn inform(program: &str, text: &str) -> ExitCode {
    match print(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            complain(program, &format!("cannot write to standard output: {error}"));
            ExitCode::from(FAILURE)
        }
        _ => ExitCode::SUCCESS,
    }
}

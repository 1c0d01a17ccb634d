// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Writing to standard output and standard error. If a stream is closed or full, the exit status still reports the outcome.

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

/// Writes a line to standard error with one call. If standard error has no reader, the line is dropped.
pub fn complain(program: &str, text: &str) {
    // The failure cannot be reported anywhere else.
    let _ = io::stderr().write_all(format!("{program}: {text}\n").as_bytes());
}

/// Prints the help or version text that the user asked for. A reader that closes the pipe early is not a failure.
pub fn inform(program: &str, text: &str) -> ExitCode {
    match print(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            complain(program, &format!("cannot write to standard output: {error}"));
            ExitCode::from(FAILURE)
        }
        _ => ExitCode::SUCCESS,
    }
}

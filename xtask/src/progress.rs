// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Messages and a progress line on stderr, for programs that take long.

use std::io::{IsTerminal, Write, stderr};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Minimum interval between lines of the same stage if stderr is not a terminal.
const PAUSE: Duration = Duration::from_secs(10);

/// Writer of a program's messages and progress line, in the format of `scripts/lib/common.sh`.
#[derive(Debug)]
pub struct Progress {
    name: String,
    start: Instant,
    terminal: bool,
    shown: Mutex<Shown>,
}

#[derive(Debug, Default)]
struct Shown {
    /// True if the terminal's last line is a progress line, which the next line overwrites.
    open: bool,
    /// Stage that was shown last, and the time when it was shown.
    last: Option<(String, Instant)>,
}

impl Progress {
    /// Creates the writer for the program `name`.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self { name: name.into(), start: Instant::now(), terminal: stderr().is_terminal(), shown: Mutex::default() }
    }

    /// Shows the current step. On a terminal, the next step overwrites the line. If stderr is not a terminal, a line is left out if the
    /// previous line has the same text before its first `:` and was shown less than `PAUSE` ago.
    pub fn show(&self, text: &str) {
        let seconds = self.start.elapsed().as_secs();
        let mut shown = self.shown();
        if self.terminal {
            // A failed write to stderr does no harm.
            let _ = write!(stderr(), "\r\x1b[K[{seconds:3} s] {text}");
            shown.open = true;
        } else if shown.is_due(text, Instant::now()) {
            let _ = writeln!(stderr(), "[{seconds:3} s] {text}");
        }
    }

    /// Removes the progress line.
    pub fn end(&self) {
        if std::mem::take(&mut self.shown().open) {
            let _ = write!(stderr(), "\r\x1b[K");
        }
    }

    /// Prints a permanent line.
    pub fn say(&self, text: &str) {
        self.end();
        let _ = writeln!(stderr(), "{}: {text}", self.name);
    }

    fn shown(&self) -> MutexGuard<'_, Shown> {
        self.shown.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shown {
    fn is_due(&mut self, text: &str, now: Instant) -> bool {
        let stage = text.split(':').next().unwrap_or_default();
        if self.last.as_ref().is_some_and(|(last, at)| last == stage && now.duration_since(*at) < PAUSE) {
            return false;
        }
        self.last = Some((stage.into(), now));
        true
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_stage_is_shown_after_a_pause_and_another_at_once() {
        let mut progress = Shown::default();
        let now = Instant::now();
        assert!(progress.is_due("compiling: step 1", now));
        assert!(!progress.is_due("compiling: step 2", now + Duration::from_secs(9)));
        assert!(progress.is_due("compiling: step 3", now + PAUSE));
        assert!(progress.is_due("linking", now + PAUSE));
    }
}

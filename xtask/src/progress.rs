// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a program that takes long says on stderr: messages, and one line about what is being done.

use std::io::{IsTerminal, Write, stderr};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Where stderr is no terminal, lines of the same stage appear at most this often.
const PAUSE: Duration = Duration::from_secs(10);

/// Messages of the program `name`. The same forms as in `scripts/lib/common.sh`.
#[derive(Debug)]
pub struct Progress {
    name: String,
    start: Instant,
    terminal: bool,
    shown: Mutex<Shown>,
}

#[derive(Debug, Default)]
struct Shown {
    /// Whether the terminal's line is to be overwritten.
    open: bool,
    /// The stage shown last, and when.
    last: Option<(String, Instant)>,
}

impl Progress {
    /// For the program `name`.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self { name: name.into(), start: Instant::now(), terminal: stderr().is_terminal(), shown: Mutex::default() }
    }

    /// Shows what is being done: on a terminal in a line that the next one overwrites, elsewhere in a line that is left out if
    /// another one with the same text up to the first `:` was shown just before.
    pub fn show(&self, text: &str) {
        let seconds = self.start.elapsed().as_secs();
        let mut shown = self.shown();
        if self.terminal {
            // Nothing is lost where stderr cannot be written.
            let _ = write!(stderr(), "\r\x1b[K[{seconds:3} s] {text}");
            shown.open = true;
        } else if shown.is_due(text, Instant::now()) {
            let _ = writeln!(stderr(), "[{seconds:3} s] {text}");
        }
    }

    /// Ends a line that is to be overwritten.
    pub fn end(&self) {
        if std::mem::take(&mut self.shown().open) {
            let _ = write!(stderr(), "\r\x1b[K");
        }
    }

    /// One line that stays.
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

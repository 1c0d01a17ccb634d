// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Counts of the guests that a run started, and of the guests that it had to restart.
//!
//! The counts are written to a file immediately, because the machine that runs the guests may die.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::Path;

use anyhow::{Context, Result};

/// Name of the file in the results directory.
const FILE: &str = "started";

/// Number of restarted guests that is acceptable in any run, even if the run is small.
const FEW: usize = 2;

/// Percentage of restarted guests that is acceptable.
const PERCENT: usize = 2;

/// Guests of a run.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Number of guests, without restarts.
    pub started: usize,
    /// Name and reason of each restart.
    pub again: Vec<String>,
}

impl Tally {
    /// Reads the tally of the results directory `out`.
    ///
    /// # Errors
    /// Fails if the file cannot be read. A missing file is not an error.
    pub fn read(out: &Path) -> Result<Self> {
        let path = out.join(FILE);
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Self::parse(&text)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
        }
    }

    /// Parses the file. A line that was cut off when the machine died is ignored.
    fn parse(text: &str) -> Self {
        let mut tally = Self::default();
        for line in text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')) {
            match line.split_once(' ') {
                Some(("started", _)) => tally.started += 1,
                Some(("again", what)) => tally.again.push(what.into()),
                _ => {}
            }
        }
        tally
    }

    /// True if too many guests were restarted: more than two, and more than 2 % of all.
    #[must_use]
    pub fn too_many_again(&self) -> bool {
        self.again.len() > FEW && self.again.len() * 100 > self.started * PERCENT
    }
}

impl fmt::Display for Tally {
    /// Formats the last line of a run.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "guests: {} started, {} of them started again", self.started, self.again.len())?;
        if self.too_many_again() {
            write!(f, ": FAILED, because more than {FEW} guests and more than {PERCENT} % were started again")?;
        }
        Ok(())
    }
}

/// Records that the guest `name` is started.
pub(crate) fn note_started(out: &Path, name: &str) -> Result<()> {
    note(out, &format!("started {name}\n"))
}

/// Records that the guest is started again, and why.
pub(crate) fn note_again(out: &Path, name: &str, why: &str) -> Result<()> {
    note(out, &format!("again {name}: {why}\n"))
}

fn note(out: &Path, line: &str) -> Result<()> {
    let path = out.join(FILE);
    let file = OpenOptions::new().create(true).append(true).open(&path);
    file.and_then(|mut file| file.write_all(line.as_bytes()))
        .with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(started: usize, again: usize) -> Tally {
        Tally { started, again: vec!["name: why".into(); again] }
    }

    #[test]
    fn two_restarted_guests_always_pass() {
        assert!(!tally(2, 2).too_many_again());
        assert!(tally(3, 3).too_many_again());
    }

    #[test]
    fn more_than_two_pass_up_to_two_percent_of_all() {
        assert!(!tally(150, 3).too_many_again());
        assert!(tally(149, 3).too_many_again());
        assert!(!tally(1000, 20).too_many_again());
        assert!(tally(1000, 21).too_many_again());
    }

    #[test]
    fn recorded_guests_are_counted_and_failure_is_shown() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Tally::read(dir.path()).unwrap(), Tally::default());
        for name in ["a", "b", "c"] {
            note_started(dir.path(), name).unwrap();
            note_again(dir.path(), name, "hung for 90 s").unwrap();
        }

        let tally = Tally::read(dir.path()).unwrap();

        assert_eq!((tally.started, tally.again.len(), tally.again[0].as_str()), (3, 3, "a: hung for 90 s"));
        assert!(tally.to_string().starts_with("guests: 3 started, 3 of them started again: FAILED"), "{tally}");
    }

    #[test]
    fn line_that_was_cut_off_is_left_out() {
        assert_eq!(Tally::parse("started a\nagain a: b\nstarted"), tally_of("a: b"));
        assert_eq!(Tally::parse("started a\nagain a: b\nagain a: x"), tally_of("a: b"));
    }

    fn tally_of(again: &str) -> Tally {
        Tally { started: 1, again: vec![again.into()] }
    }
}

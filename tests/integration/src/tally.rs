// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! How many guests a run has started, and which of them it had to start again.
//!
//! Both are noted in a file as they happen, as the machine that runs the guests may die before it can tell.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::Path;

use anyhow::{Context, Result};

/// The file, in the directory of a run's results.
const FILE: &str = "started";

/// So many guests that were started again are never too many.
const FEW: usize = 2;

/// More than this share of all guests, in percent, is too many.
const PERCENT: usize = 2;

/// The guests of a run.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// How many were started, each counted once.
    pub started: usize,
    /// For each that was started again: its name and why.
    pub again: Vec<String>,
}

impl Tally {
    /// Reads what was noted in `out`, the directory of a run's results.
    ///
    /// # Errors
    /// The file cannot be read; that there is none is no error.
    pub fn read(out: &Path) -> Result<Self> {
        let path = out.join(FILE);
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Self::parse(&text)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
        }
    }

    /// A line that was cut off as the machine died is left out.
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

    /// Whether so many guests were started again that the run fails: more than two that are also more than 2 % of all.
    #[must_use]
    pub fn too_many_again(&self) -> bool {
        self.again.len() > FEW && self.again.len() * 100 > self.started * PERCENT
    }
}

impl fmt::Display for Tally {
    /// One line, the last of a run.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "guests: {} started, {} of them started again", self.started, self.again.len())?;
        if self.too_many_again() {
            write!(f, ": FAILED, as these are more than {FEW} and more than {PERCENT} %")?;
        }
        Ok(())
    }
}

/// Notes that the guest `name` is started.
pub(crate) fn note_started(out: &Path, name: &str) -> Result<()> {
    note(out, &format!("started {name}\n"))
}

/// Notes that it is started again, and why.
pub(crate) fn note_again(out: &Path, name: &str, why: &str) -> Result<()> {
    note(out, &format!("again {name}: {why}\n"))
}

fn note(out: &Path, line: &str) -> Result<()> {
    let path = out.join(FILE);
    let file = OpenOptions::new().create(true).append(true).open(&path);
    file.and_then(|mut file| file.write_all(line.as_bytes())).with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(started: usize, again: usize) -> Tally {
        Tally { started, again: vec!["name: why".into(); again] }
    }

    #[test]
    fn two_guests_started_again_pass_however_few_there_were() {
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
    fn what_was_noted_is_counted_and_the_line_says_a_failure() {
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

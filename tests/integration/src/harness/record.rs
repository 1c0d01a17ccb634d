// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Record of finished tests. Each result is written immediately, so that another machine can continue the tests if this machine
//! dies.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::env;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

/// Result of a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The test has begun.
    Started,
    /// The test has passed.
    Passed,
    /// The test has failed.
    Failed,
}

impl Outcome {
    const ALL: [(Self, &'static str); 3] =
        [(Self::Started, "started"), (Self::Passed, "passed"), (Self::Failed, "failed")];

    fn word(self) -> &'static str {
        Self::ALL.into_iter().find(|(outcome, _)| *outcome == self).map_or("", |(_, word)| word)
    }
}

/// File of lines `OUTCOME TEST MILLISECONDS`. For each test, the last line counts. The file `FILE.failures` contains the output
/// of failed tests.
#[derive(Debug, Clone)]
pub struct Record {
    path: PathBuf,
}

/// Contents of a record: tests with their last results.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Done(BTreeMap<String, (Outcome, Duration)>);

impl Record {
    /// Variable that names the file.
    pub const VARIABLE: &'static str = "CAROM_TEST_RECORD";

    /// Returns a record in this file. The file may be missing.
    #[must_use]
    pub fn new(path: &Path) -> Self {
        Self { path: path.into() }
    }

    /// Returns the record that the environment variable names, if it is set.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub(super) fn from_env() -> Result<Option<Self>> {
        let Some(path) = env::var_os(Self::VARIABLE) else { return Ok(None) };
        let record = Self { path: path.into() };
        append(&record.path, "").with_context(|| Self::VARIABLE.to_owned())?;
        Ok(Some(record))
    }

    /// Returns the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the recorded results, or no results if the file cannot be read. Ignores a line that was cut off when the
    /// machine died.
    #[must_use]
    pub fn done(&self) -> Done {
        let text = fs::read_to_string(&self.path).unwrap_or_default();
        let whole = text.split_inclusive('\n').filter_map(|line| line.strip_suffix('\n')?.split_once(' '));
        let known = |(word, test): (&str, &str)| {
            let (outcome, _) = Outcome::ALL.into_iter().find(|(_, known)| *known == word)?;
            let (test, time) = test.split_once(' ')?;
            Some((test.into(), (outcome, Duration::from_millis(time.parse().ok()?))))
        };
        Done(whole.filter_map(known).collect())
    }

    /// Returns the output of failed tests.
    #[must_use]
    pub fn failures(&self) -> String {
        fs::read_to_string(self.failures_path()).unwrap_or_default()
    }

    /// Records the result and the duration of a test, and its output if it failed.
    pub(super) fn note(&self, test: &str, outcome: Outcome, time: Duration, said: &str) -> Result<()> {
        if outcome == Outcome::Failed {
            append(&self.failures_path(), &format!("---- {test} ----\n{said}\n"))?;
        }
        append(&self.path, &format!("{} {test} {}\n", outcome.word(), time.as_millis()))
    }

    fn failures_path(&self) -> PathBuf {
        let mut path = self.path.clone().into_os_string();
        path.push(".failures");
        path.into()
    }
}

impl Done {
    /// Returns the number of tests with this result.
    #[must_use]
    pub fn count(&self, outcome: Outcome) -> usize {
        self.0.values().filter(|(known, _)| *known == outcome).count()
    }

    /// Returns the number of finished tests.
    #[must_use]
    pub fn finished(&self) -> usize {
        self.count(Outcome::Passed) + self.count(Outcome::Failed)
    }

    /// Returns the test that has begun but has not finished.
    #[must_use]
    pub fn at_hand(&self) -> Option<&str> {
        self.0.iter().find(|(_, (outcome, _))| *outcome == Outcome::Started).map(|(test, _)| test.as_str())
    }

    /// Returns the `count` slowest tests, the slowest first.
    #[must_use]
    pub fn longest(&self, count: usize) -> Vec<(&str, Duration)> {
        let mut tests: Vec<_> = self.0.iter().map(|(test, &(_, time))| (test.as_str(), time)).collect();
        tests.sort_by_key(|&(_, time)| Reverse(time));
        tests.truncate(count);
        tests
    }

    /// True if this test is finished.
    pub(super) fn has(&self, test: &str) -> bool {
        self.0.get(test).is_some_and(|&(outcome, _)| outcome != Outcome::Started)
    }
}

fn append(path: &Path, text: &str) -> Result<()> {
    let file = OpenOptions::new().create(true).append(true).open(path);
    file.and_then(|mut file| file.write_all(text.as_bytes()))
        .with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finished_tests_are_known_and_a_started_test_is_not_finished() {
        let dir = tempfile::tempdir().unwrap();
        let record = Record::new(&dir.path().join("record"));
        assert_eq!(record.done(), Done::default());
        for (test, outcome, time) in [("a", Outcome::Passed, 1), ("b::c", Outcome::Failed, 2)] {
            record.note(test, Outcome::Started, Duration::ZERO, "").unwrap();
            record.note(test, outcome, Duration::from_secs(time), "what it said").unwrap();
        }
        record.note("d", Outcome::Started, Duration::ZERO, "").unwrap();

        let done = record.done();

        assert!(done.has("a") && done.has("b::c") && !done.has("d") && !done.has("e"));
        assert_eq!((done.count(Outcome::Passed), done.count(Outcome::Failed), done.finished()), (1, 1, 2));
        assert_eq!(done.at_hand(), Some("d"));
        assert_eq!(done.longest(2), [("b::c", Duration::from_secs(2)), ("a", Duration::from_secs(1))]);
        assert_eq!(record.failures(), "---- b::c ----\nwhat it said\n");
    }

    #[test]
    fn line_that_was_cut_off_does_not_finish_a_test() {
        let dir = tempfile::tempdir().unwrap();
        let record = Record::new(&dir.path().join("record"));
        for cut in ["passed a 12", "passed a", "pas"] {
            fs::write(record.path(), format!("started a 0\n{cut}")).unwrap();
            assert_eq!(record.done().at_hand(), Some("a"), "{cut}");
        }
    }
}

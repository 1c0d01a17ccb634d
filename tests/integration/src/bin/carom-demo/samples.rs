// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What was measured, guest by guest, in a file that outlives the rig's machine: should that die, the next one goes on.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::Path;

use anyhow::{Context, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// How often a guest is begun at most: the machine dies for reasons of its own, but not always.
const TRIES: usize = 3;

/// What is measured in one guest.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Measured<F> {
    #[serde(flatten)]
    pub(crate) figures: F,
    /// Of what runs in the guest.
    pub(crate) versions: BTreeMap<String, String>,
    pub(crate) retries: u32,
}

/// One guest that ended, well or not.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Sample<F> {
    pub(crate) name: String,
    pub(crate) round: u32,
    pub(crate) two_jobs: bool,
    /// The figures, or why there are none.
    pub(crate) measured: Result<Measured<F>, String>,
}

/// A line of the file.
#[derive(Debug, Serialize, Deserialize)]
enum Line<F> {
    Begin { name: String, round: u32, two_jobs: bool },
    End(Sample<F>),
}

/// All samples, and the file that each is noted in at once.
#[derive(Debug)]
pub(crate) struct Samples<F> {
    file: File,
    pub(crate) all: Vec<Sample<F>>,
}

impl<F: Clone + Serialize + DeserializeOwned> Samples<F> {
    /// Opens the file, or makes it.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let text = match fs::read_to_string(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            other => other.with_context(|| format!("reading {}", path.display()))?,
        };
        let file = OpenOptions::new().create(true).append(true).open(path);
        let file = file.with_context(|| format!("opening {}", path.display()))?;
        Ok(Self { file, all: ended(&text) })
    }

    /// Whether this guest has ended before, or is not to be tried again.
    pub(crate) fn has(&self, name: &str, round: u32, two_jobs: bool) -> bool {
        self.all.iter().any(|sample| (sample.name.as_str(), sample.round, sample.two_jobs) == (name, round, two_jobs))
    }

    /// Notes that a guest starts.
    pub(crate) fn begin(&mut self, name: &str, round: u32, two_jobs: bool) -> Result<()> {
        self.write(&Line::<F>::Begin { name: name.into(), round, two_jobs })
    }

    /// Notes what came of it.
    pub(crate) fn end(&mut self, sample: Sample<F>) -> Result<()> {
        self.write(&Line::End(sample.clone()))?;
        self.all.push(sample);
        Ok(())
    }

    fn write(&mut self, line: &Line<F>) -> Result<()> {
        let text = serde_json::to_string(line)? + "\n";
        self.file.write_all(text.as_bytes()).context("noting a sample")
    }
}

/// The samples in a file's `text`. A guest that was begun too often without an end failed.
fn ended<F: Clone + DeserializeOwned>(text: &str) -> Vec<Sample<F>> {
    // The machine may have died while it wrote: a line that is cut counts for nothing.
    let lines: Vec<Line<F>> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let mut samples = Vec::new();
    let mut begun: BTreeMap<(&str, u32, bool), usize> = BTreeMap::new();
    for line in &lines {
        match line {
            Line::Begin { name, round, two_jobs } => *begun.entry((name, *round, *two_jobs)).or_default() += 1,
            Line::End(sample) => {
                begun.remove(&(sample.name.as_str(), sample.round, sample.two_jobs));
                samples.push(sample.clone());
            }
        }
    }
    for ((name, round, two_jobs), tries) in begun {
        if tries >= TRIES {
            let measured = Err(format!("the machine died each of {tries} times"));
            samples.push(Sample { name: name.into(), round, two_jobs, measured });
        }
    }
    samples
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Figures of a guest.
    type Figures = BTreeMap<String, u32>;

    fn failed(name: &str) -> Sample<Figures> {
        Sample { name: name.into(), round: 0, two_jobs: false, measured: Err("it failed".into()) }
    }

    #[test]
    fn samples_are_there_when_the_file_is_opened_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("samples");
        let mut samples: Samples<Figures> = Samples::open(&path).unwrap();
        samples.begin("strict", 0, false).unwrap();
        samples.end(failed("strict")).unwrap();
        samples.begin("lazy", 0, false).unwrap();

        let again: Samples<Figures> = Samples::open(&path).unwrap();
        assert!(again.has("strict", 0, false));
        assert!(!again.has("strict", 1, false) && !again.has("strict", 0, true));
        assert!(!again.has("lazy", 0, false), "it has not ended: it is tried again");
    }

    #[test]
    fn guest_that_always_ends_the_machine_is_given_up() {
        let begin = r#"{"Begin":{"name":"strict","round":0,"two_jobs":true}}"#;
        assert!(ended::<Figures>(&format!("{begin}\n{begin}\n")).is_empty());
        let samples: Vec<Sample<Figures>> = ended(&format!("{begin}\n{begin}\n{begin}\n{{\"Beg"));
        assert_eq!(samples.len(), 1);
        assert!(samples[0].measured.as_ref().unwrap_err().contains("3 times"));
    }
}

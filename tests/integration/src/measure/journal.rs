// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Journal of measurements, in a file that survives the machine. If the machine dies, the next machine continues from this file.

use std::fmt::Debug;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Maximum number of attempts of a step. One attempt is not enough, because the machine sometimes dies for other reasons than the
/// step.
const TRIES: usize = 3;

/// Result of a step, which the journal stores.
pub trait Sample: Clone + Serialize + DeserializeOwned {
    /// Key that identifies a step within a run.
    type Key: Clone + Debug + PartialEq + Serialize + DeserializeOwned;

    /// Returns the step's key.
    fn key(&self) -> Self::Key;

    /// Creates the sample of a step that failed for this reason.
    fn failed(key: Self::Key, reason: String) -> Self;
}

/// Step of a measurement.
pub trait Step {
    /// Result of the step.
    type Sample: Sample;

    /// Returns the key of the step.
    fn key(&self) -> <Self::Sample as Sample>::Key;

    /// Returns a short description of the step for the user.
    fn label(&self) -> String;

    /// Returns the estimated duration. After the first steps, their actual durations scale the estimates, so only the ratios
    /// between estimates matter.
    fn estimate(&self) -> Duration;
}

/// Line of the file.
#[derive(Debug, Serialize, Deserialize)]
enum Line<K, S> {
    Begin(K),
    End(S),
}

/// All samples, and the file that each new sample is saved to.
#[derive(Debug)]
pub struct Journal<S> {
    file: File,
    /// Samples, in the order of measurement.
    pub all: Vec<S>,
}

impl<S: Sample> Journal<S> {
    /// Opens or creates the file.
    ///
    /// # Errors
    /// Fails if the file can be neither read nor created.
    pub fn open(path: &Path) -> Result<Self> {
        let text = match fs::read_to_string(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
            other => other.with_context(|| format!("cannot read {}", path.display()))?,
        };
        let file = OpenOptions::new().create(true).append(true).open(path);
        let mut file = file.with_context(|| format!("cannot open {}", path.display()))?;
        if !text.is_empty() && !text.ends_with('\n') {
            // If the last line is incomplete, this line break separates it from the next line.
            file.write_all(b"\n").context("cannot write to the file of samples (--samples)")?;
        }
        Ok(Self { file, all: ended(&text) })
    }

    /// True if this step needs no further attempt: it has succeeded or failed, or the machine has died in each of its [`TRIES`]
    /// attempts.
    pub fn has(&self, key: &S::Key) -> bool {
        self.all.iter().any(|sample| sample.key() == *key)
    }

    /// Records that a step begins.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn begin(&mut self, key: &S::Key) -> Result<()> {
        self.write(&Line::<_, S>::Begin(key.clone()))
    }

    /// Records the result of a step.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn end(&mut self, sample: S) -> Result<()> {
        self.write(&Line::<S::Key, _>::End(sample.clone()))?;
        self.all.push(sample);
        Ok(())
    }

    /// Measures each step that has no result in the file yet, and records the result. If a step fails, records the failure and
    /// continues with the next step. For each step, prints its label and the estimated remaining time to stderr. The estimate
    /// is based on the duration of the steps so far.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn measure<T: Step<Sample = S>>(&mut self, steps: &[T], measure: impl Fn(&T) -> Result<S>) -> Result<()> {
        let missing: Vec<&T> = steps.iter().filter(|step| !self.has(&step.key())).collect();
        let mut pace = Pace::new(missing.iter().map(|step| step.estimate()).sum());
        for step in missing {
            let done = self.all.len();
            eprintln!("{} step {}/{}: {}", pace, done + 1, steps.len(), step.label());
            self.begin(&step.key())?;
            let start = Instant::now();
            let sample = measure(step).unwrap_or_else(|error| {
                eprintln!("{}: {error:#}", step.label());
                S::failed(step.key(), format!("{error:#}").lines().next().unwrap_or_default().to_owned())
            });
            self.end(sample)?;
            pace.note(step.estimate(), start.elapsed());
        }
        eprintln!("{pace} all steps ended");
        Ok(())
    }

    fn write(&mut self, line: &Line<S::Key, S>) -> Result<()> {
        let text = serde_json::to_string(line)? + "\n";
        self.file.write_all(text.as_bytes()).context("cannot save a sample to the file of samples (--samples)")
    }
}

/// Returns the samples in a file's `text`. A step that has begun [`TRIES`] times but never ended counts as failed.
fn ended<S: Sample>(text: &str) -> Vec<S> {
    // The machine may have died while writing: ignore incomplete lines.
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Line<S::Key, S>>(line).ok());
    let mut samples: Vec<S> = Vec::new();
    let mut begun: Vec<(S::Key, usize)> = Vec::new();
    for line in lines {
        match line {
            Line::Begin(key) => match begun.iter_mut().find(|(known, _)| *known == key) {
                Some((_, tries)) => *tries += 1,
                None => begun.push((key, 1)),
            },
            Line::End(sample) => {
                begun.retain(|(key, _)| *key != sample.key());
                samples.push(sample);
            }
        }
    }
    for (key, tries) in begun.into_iter().filter(|(_, tries)| *tries >= TRIES) {
        samples.push(S::failed(key, format!("the machine died in each of {tries} attempts")));
    }
    samples
}

/// Progress of a run.
#[derive(Debug)]
struct Pace {
    start: Instant,
    /// Two sums over the finished steps: of their estimates, and of their actual durations.
    done: (Duration, Duration),
    left: Duration,
}

impl Pace {
    fn new(left: Duration) -> Self {
        Self { start: Instant::now(), done: (Duration::ZERO, Duration::ZERO), left }
    }

    fn note(&mut self, estimate: Duration, took: Duration) {
        self.done = (self.done.0 + estimate, self.done.1 + took);
        self.left = self.left.saturating_sub(estimate);
    }

    fn remains(&self) -> Duration {
        if self.done.0.is_zero() {
            return self.left;
        }
        self.left.mul_f64(self.done.1.as_secs_f64() / self.done.0.as_secs_f64())
    }
}

impl std::fmt::Display for Pace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let remains = self.remains().as_secs();
        write!(f, "[{:3} s, {}:{:02} min remain]", self.start.elapsed().as_secs(), remains / 60, remains % 60)
    }
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    /// Sample that is its own key.
    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    struct Plain {
        name: String,
        result: Result<u32, String>,
    }

    impl Sample for Plain {
        type Key = String;

        fn key(&self) -> String {
            self.name.clone()
        }

        fn failed(name: String, reason: String) -> Self {
            Self { name, result: Err(reason) }
        }
    }

    /// Step that consists of its name.
    struct Named(&'static str);

    impl Step for Named {
        type Sample = Plain;

        fn key(&self) -> String {
            self.0.into()
        }

        fn label(&self) -> String {
            self.0.into()
        }

        fn estimate(&self) -> Duration {
            Duration::from_secs(1)
        }
    }

    fn sample(name: &str) -> Plain {
        Plain { name: name.into(), result: Ok(1) }
    }

    #[test]
    fn samples_survive_reopening_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("samples");
        let mut journal = Journal::open(&path).unwrap();
        journal.begin(&"a".into()).unwrap();
        journal.end(sample("a")).unwrap();
        journal.begin(&"b".into()).unwrap();

        let again: Journal<Plain> = Journal::open(&path).unwrap();
        assert_eq!(again.all, [sample("a")]);
        assert!(again.has(&"a".into()));
        assert!(!again.has(&"b".into()), "this step has not ended, so it must run again");
    }

    #[test]
    fn step_that_always_ends_the_machine_is_given_up() {
        assert!(ended::<Plain>("{\"Begin\":\"a\"}\n{\"Begin\":\"a\"}\n").is_empty());
        let samples: Vec<Plain> = ended("{\"Begin\":\"a\"}\n{\"Begin\":\"a\"}\n{\"Begin\":\"a\"}\n{\"Beg");
        assert_eq!(samples.len(), 1);
        assert!(samples[0].result.as_ref().unwrap_err().contains("3 attempts"));
    }

    #[test]
    fn line_that_was_cut_off_does_not_spoil_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("samples");
        fs::write(&path, "{\"Begin\":\"a\"}\n{\"End").unwrap();
        Journal::open(&path).unwrap().end(sample("a")).unwrap();
        assert_eq!(Journal::<Plain>::open(&path).unwrap().all, [sample("a")]);
    }

    #[test]
    fn failed_steps_are_recorded_and_others_are_measured_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("samples");
        let measure = |step: &Named| if step.0 == "bad" { bail!("it\nfailed") } else { Ok(sample(step.0)) };
        Journal::open(&path).unwrap().measure(&["a", "bad", "b"].map(Named), measure).unwrap();

        let mut again = Journal::<Plain>::open(&path).unwrap();
        let once = |step: &Named| if step.0 == "c" { Ok(sample("c")) } else { bail!("{} is measured again", step.0) };
        again.measure(&["a", "bad", "b", "c"].map(Named), once).unwrap();

        let bad = Plain { name: "bad".into(), result: Err("it".into()) };
        assert_eq!(again.all, [sample("a"), bad, sample("b"), sample("c")]);
    }

    #[test]
    fn remaining_time_follows_the_duration_of_past_steps() {
        let mut pace = Pace::new(Duration::from_secs(30));
        assert_eq!(pace.remains(), Duration::from_secs(30));
        pace.note(Duration::from_secs(10), Duration::from_secs(25));
        assert_eq!(pace.remains(), Duration::from_secs(50));
    }
}

// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sample: the result of a piece of work (usually of one guest) in one round.

use std::time::Duration;

use anyhow::{Result, ensure};
use carom_integration::measure::journal;
use serde::{Deserialize, Serialize};

use crate::table::{Measured, Row, Table, Work};

/// Key of a sample.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Key {
    /// Name of the run: the selection of cells, Carom's version, and the VMMs for comparison. The file may contain samples of
    /// other runs, which are not used.
    pub(crate) run: String,
    pub(crate) table: String,
    pub(crate) work: String,
    pub(crate) round: u32,
}

/// Result of a piece of work, or the reason why the work has no result.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Sample {
    pub(crate) key: Key,
    pub(crate) measured: std::result::Result<Measured, String>,
}

impl journal::Sample for Sample {
    type Key = Key;

    fn key(&self) -> Key {
        self.key.clone()
    }

    fn failed(key: Key, reason: String) -> Self {
        Self { key, measured: Err(reason) }
    }
}

/// Piece of work in one round.
pub(crate) struct Step {
    pub(crate) key: Key,
    pub(crate) work: Work,
}

impl journal::Step for Step {
    type Sample = Sample;

    fn key(&self) -> Key {
        self.key.clone()
    }

    fn label(&self) -> String {
        format!("{}, {}, round {}", self.key.table, self.key.work, self.key.round + 1)
    }

    fn estimate(&self) -> Duration {
        self.work.estimate
    }
}

/// Returns all work of a run, round by round. A table with fewer rounds than other tables is missing in the later rounds. Within a
/// round, the work of a table keeps its order, so pieces of work that are compared are adjacent.
pub(crate) fn steps(
    run: &str,
    rounds: impl Fn(&Table) -> u32,
    tables: &[&Table],
    work: impl Fn(&Table) -> Vec<Work>,
) -> Vec<Step> {
    let key = |table: &Table, work: &Work, round| {
        let (run, table, work) = (run.to_owned(), table.name.to_owned(), work.name.clone());
        Key { run, table, work, round }
    };
    let mut steps = Vec::new();
    for round in 0..tables.iter().map(|table| rounds(table)).max().unwrap_or(0) {
        for table in tables.iter().filter(|table| round < rounds(table)) {
            steps.extend(work(table).into_iter().map(|work| Step { key: key(table, &work, round), work }));
        }
    }
    steps
}

/// Returns the steps whose guests have one of these modes, or all steps if `modes` is empty.
///
/// # Errors
/// Fails if `modes` contains a mode that no guest of the run has.
pub(crate) fn only(steps: Vec<Step>, modes: &[String]) -> Result<Vec<Step>> {
    // The name of the work begins with the mode.
    let is_of = |step: &Step, mode: &String| step.work.name.split([' ', ',']).next() == Some(mode.as_str());
    for mode in modes {
        ensure!(steps.iter().any(|step| is_of(step, mode)), "--only '{mode}': no guest of this run has this mode");
    }
    let wanted = |step: &Step| modes.is_empty() || modes.iter().any(|mode| is_of(step, mode));
    Ok(steps.into_iter().filter(wanted).collect())
}

/// Returns the samples with the requested keys. `samples` may also contain samples of other runs, which are left out.
pub(crate) fn of<'a>(samples: &'a [Sample], asked: &[Key]) -> Vec<&'a Sample> {
    samples.iter().filter(|sample| asked.contains(&sample.key)).collect()
}

/// Returns all rows of a table, each with its round.
pub(crate) fn rows<'a>(samples: &'a [&Sample], table: &'a str) -> impl Iterator<Item = (u32, &'a Row)> {
    let of_it = samples.iter().filter(move |sample| sample.key.table == table);
    of_it
        .filter_map(|sample| Some((sample.key.round, sample.measured.as_ref().ok()?)))
        .flat_map(|(round, measured)| measured.rows.iter().map(move |row| (round, row)))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns a sample of reads at depth 64 by one job.
    pub(crate) fn sample(round: u32, mode: &str, size: &str, iops: f64) -> Sample {
        let of = [
            ("mode", mode.into()),
            ("pattern", "read".into()),
            ("size", size.into()),
            ("depth", 64.into()),
            ("jobs", 1.into()),
        ];
        let mut sample = sample_of("throughput", vec![Row::new(of, [("iops", iops)])]);
        (sample.key.work, sample.key.round) = (mode.into(), round);
        sample
    }

    #[test]
    fn samples_are_found_across_tables_but_not_across_runs() {
        let [engine, sync, other] = ["engine", "sync", "sync"].map(|table| sample_of(table, Vec::new()));
        let other = Sample { key: Key { run: "another".into(), ..other.key.clone() }, ..other };
        let asked = [engine.key.clone(), sync.key.clone()];
        let samples = [engine, other, sync];
        let tables: Vec<&str> = of(&samples, &asked).iter().map(|sample| sample.key.table.as_str()).collect();
        assert_eq!(tables, ["engine", "sync"]);
    }

    #[test]
    fn only_keeps_the_steps_of_the_named_modes() {
        let work = |_: &Table| {
            let names = ["no-viommu, 1 GiB", "bounce with 1 jobs", "bounce with 2 jobs"];
            let run = || -> crate::table::Measure { Box::new(|_, _| Ok(Measured::default())) };
            names.map(|name| Work { name: name.into(), estimate: Duration::ZERO, run: run() }).into()
        };
        let names = |modes: &[&str]| {
            let modes: Vec<String> = modes.iter().map(|mode| (*mode).into()).collect();
            let steps = only(steps("r", |_| 2, &[&crate::disk::TABLE], work), &modes)?;
            Ok::<Vec<String>, anyhow::Error>(steps.into_iter().map(|step| step.key.work).collect())
        };
        assert_eq!(names(&[]).unwrap().len(), 6);
        assert_eq!(names(&["no-viommu"]).unwrap(), ["no-viommu, 1 GiB"; 2]);
        assert_eq!(names(&["no-viommu", "bounce"]).unwrap().len(), 6);
        let refused = names(&["bounce", "lazier"]).unwrap_err().to_string();
        assert_eq!(refused, "--only 'lazier': no guest of this run has this mode");
    }

    #[test]
    fn table_has_the_given_number_of_rounds() {
        let work = |_: &Table| {
            vec![Work { name: "a".into(), estimate: Duration::ZERO, run: Box::new(|_, _| Ok(Measured::default())) }]
        };
        let rounds = |table: &Table| if table.is_once_enough { 1 } else { 2 };
        let steps = steps("r", rounds, &[&crate::counts::TABLE, &crate::disk::TABLE], work);
        let names: Vec<(String, u32)> = steps.into_iter().map(|step| (step.key.table, step.key.round)).collect();
        assert_eq!(names, [("counts".into(), 0), ("disk".into(), 0), ("disk".into(), 1)]);
    }

    /// Returns a sample of the first round.
    pub(crate) fn sample_of(table: &str, rows: Vec<Row>) -> Sample {
        let key = Key { run: "r".into(), table: table.into(), work: "w".into(), round: 0 };
        Sample { key, measured: Ok(Measured { rows, retries: 1, ..Measured::default() }) }
    }
}

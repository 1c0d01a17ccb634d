// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Results of a run, in the format of `--json`: rows with the medians and the spread over the rounds.

use std::collections::BTreeMap;

use carom_integration::measure::machine::Machine;
use carom_integration::measure::statistics::{Spread, median};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::sample::{Sample, rows};
use crate::summary::{self, Measured, Summary};
use crate::table::Row;
use crate::tables::TABLES;

/// Results of one run.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Results {
    pub(crate) machine: Machine,
    pub(crate) versions: BTreeMap<String, String>,
    /// Selection of cells: `quick`, `plain` or `all-cells`. If busy loops ran, their number follows.
    pub(crate) scope: String,
    /// Maximum number of rounds of a table. All tables finish a round before any table starts the next round.
    pub(crate) rounds: u32,
    /// Tables by name.
    pub(crate) tables: BTreeMap<String, Vec<Merged>>,
    /// Median over the rounds of each summary figure, by name.
    pub(crate) summary: BTreeMap<String, f64>,
    /// Number of rounds, spread and confidence interval of each summary figure, by name.
    pub(crate) summary_measured: BTreeMap<String, Measured>,
    /// Failures, one per line.
    pub(crate) failures: Vec<String>,
    /// Number of guests that were started again, because they hung or the emulator ended them.
    pub(crate) retries: u32,
}

/// Row of a table, combined from the samples of all rounds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Merged {
    /// Keys of the row, and the median of each figure.
    #[serde(flatten)]
    pub(crate) fields: Map<String, Value>,
    /// Number of rounds that measured the row.
    pub(crate) rounds: usize,
    /// Spread of each figure over the rounds, by name.
    pub(crate) spread: BTreeMap<String, Spread>,
}

impl Results {
    /// Combines the samples of all rounds into results.
    pub(crate) fn new(
        machine: Machine,
        mut versions: BTreeMap<String, String>,
        scope: &str,
        rounds: u32,
        samples: &[&Sample],
    ) -> Self {
        let mut failures = Vec::new();
        let mut retries = 0;
        for sample in samples {
            let place = format!("{}, {}, round {}", sample.key.table, sample.key.work, sample.key.round + 1);
            match &sample.measured {
                Ok(measured) => {
                    versions.extend(measured.versions.clone());
                    failures.extend(measured.failures.iter().map(|failure| format!("{place}: {failure}")));
                    retries += measured.retries;
                }
                Err(error) => failures.push(format!("{place}: {error}")),
            }
        }
        let mut tables = BTreeMap::new();
        for table in &TABLES {
            let rows: Vec<&Row> = rows(samples, table.name).map(|(_, row)| row).collect();
            if !rows.is_empty() {
                tables.insert(table.name.into(), merge(&rows));
            }
        }
        let Summary { medians: summary, measured: summary_measured } = summary::of(samples);
        let scope = scope.into();
        Self { machine, versions, scope, rounds, tables, summary, summary_measured, failures, retries }
    }
}

/// Combines rows with equal keys. The combined rows keep the order in which their keys first occur.
fn merge(rows: &[&Row]) -> Vec<Merged> {
    let mut groups: Vec<(&Row, Vec<&Row>)> = Vec::new();
    for &row in rows {
        match groups.iter_mut().find(|(first, _)| first.of == row.of) {
            Some((_, group)) => group.push(row),
            None => groups.push((row, vec![row])),
        }
    }
    groups.into_iter().map(|(first, group)| merged(first, &group)).collect()
}

fn merged(first: &Row, group: &[&Row]) -> Merged {
    let mut fields: Map<String, Value> = first.of.iter().cloned().collect();
    let mut spread = BTreeMap::new();
    for key in first.figures.keys() {
        let figures: Vec<f64> = group.iter().filter_map(|row| row.figures.get(key).copied()).collect();
        if let (Some(median), Some(apart)) = (median(figures.iter().copied()), Spread::of(&figures)) {
            fields.insert(key.clone(), median.into());
            spread.insert(key.clone(), apart);
        }
    }
    Merged { fields, rounds: group.len(), spread }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::sample::tests::sample;

    pub(crate) fn machine() -> Machine {
        Machine { host: "h".into(), rig: "tcg".into(), kernel: "k".into(), guest_ram_bytes: 1 << 30 }
    }

    pub(crate) fn results(samples: &[Sample]) -> Results {
        Results::new(machine(), BTreeMap::new(), "quick", 3, &samples.iter().collect::<Vec<_>>())
    }

    #[test]
    fn rounds_become_a_median_with_its_spread() {
        let samples = [900.0, 1000.0, 1400.0].map(|iops| sample(0, "strict", "4k", iops));
        let results = results(&samples);
        let [row] = &results.tables["throughput"][..] else { panic!("{results:?}") };
        assert_eq!((row.fields["iops"].as_f64(), row.rounds, row.spread["iops"].max), (Some(1000.0), 3, 1400.0));
        assert_eq!((&row.fields["mode"], results.retries), (&Value::from("strict"), 3));
    }

    #[test]
    fn failure_has_its_place_and_other_rounds_count() {
        let mut samples = vec![sample(0, "strict", "4k", 1000.0), sample(1, "strict", "4k", 1.0)];
        samples[1].measured = Err("it hung".into());
        let results = results(&samples);
        assert_eq!(results.failures, ["throughput, strict, round 2: it hung"]);
        assert_eq!(results.tables["throughput"][0].rounds, 1);
    }

    #[test]
    fn results_are_read_as_they_were_written() {
        let results = results(&[sample(0, "strict", "4k", 1000.5), sample(0, "bounce", "4k", 3001.5)]);
        let text = serde_json::to_string(&results).unwrap();
        assert_eq!(serde_json::from_str::<Results>(&text).unwrap(), results);
    }
}

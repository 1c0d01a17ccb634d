// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Definition of a table: the work that fills it, its rows, and its presentation.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use carom_integration::{Guest, Outcome, Site, workload};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Selection of the cells to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// The fewest cells.
    Quick,
    /// A selection that takes about an hour.
    Plain,
    /// All cells.
    All,
}

impl Scope {
    /// Returns the name of the scope in the results.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Quick => "quick",
            Self::Plain => "plain",
            Self::All => "all-cells",
        }
    }
}

/// Table of results.
pub(crate) struct Table {
    /// Name of the table.
    pub(crate) name: &'static str,
    /// Key whose values are the column headings. The other keys identify the rows.
    pub(crate) across: &'static str,
    /// Figures that the report shows. The report has a separate table for each figure.
    pub(crate) shown: &'static [Shown],
    /// True if a plain run measures the table in only one round by default, because the table takes long or its figures vary
    /// little.
    pub(crate) is_once_enough: bool,
    /// Returns the work of one round.
    pub(crate) work: fn(Scope, &Site) -> Vec<Work>,
}

impl Table {
    pub(crate) const fn new(
        name: &'static str,
        across: &'static str,
        shown: &'static [Shown],
        work: fn(Scope, &Site) -> Vec<Work>,
    ) -> Self {
        Self { name, across, shown, is_once_enough: false, work }
    }

    /// Makes a plain run measure the table in only one round by default.
    pub(crate) const fn once(mut self) -> Self {
        self.is_once_enough = true;
        self
    }
}

/// Presentation of a figure.
pub(crate) struct Shown {
    /// Key of the figure in rows.
    pub(crate) figure: &'static str,
    /// Description of the figure, with the unit.
    pub(crate) title: &'static str,
    /// Number of decimals.
    pub(crate) places: usize,
}

impl Shown {
    pub(crate) const fn new(figure: &'static str, title: &'static str, places: usize) -> Self {
        Self { figure, title, places }
    }
}

/// Row of a single measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    /// Keys, which identify the measurement.
    pub(crate) of: Vec<(String, Value)>,
    /// Figures by name.
    pub(crate) figures: BTreeMap<String, f64>,
}

impl Row {
    pub(crate) fn new<const N: usize, const M: usize>(of: [(&str, Value); N], figures: [(&str, f64); M]) -> Self {
        Self {
            of: of.into_iter().map(|(key, value)| (key.into(), value)).collect(),
            figures: figures.into_iter().map(|(key, figure)| (key.into(), figure)).collect(),
        }
    }

    /// Returns the value of a key.
    pub(crate) fn key(&self, key: &str) -> Option<&Value> {
        self.of.iter().find(|(known, _)| known == key).map(|(_, value)| value)
    }
}

/// Part of a table that is measured in one step, usually by one guest.
pub(crate) struct Work {
    /// Name, unique within the table.
    pub(crate) name: String,
    /// Estimated duration.
    pub(crate) estimate: Duration,
    /// Function that does the work.
    pub(crate) run: Measure,
}

/// Function that does a piece of work at a site. The second argument is a name for its guests, which is unique within the run.
pub(crate) type Measure = Box<dyn Fn(&Site, &str) -> Result<Measured>>;

/// Result of a measurement.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Measured {
    /// Rows that this measurement adds to the table.
    pub(crate) rows: Vec<Row>,
    /// Failures that did not end the measurement, one per line.
    pub(crate) failures: Vec<String>,
    /// Versions of the programs in the guest.
    pub(crate) versions: BTreeMap<String, String>,
    /// Number of restarts of a guest.
    pub(crate) retries: u32,
}

impl Measured {
    /// Returns `rows`, with the program versions and the number of restarts from the guest's outcome.
    pub(crate) fn of(outcome: &Outcome, rows: Vec<Row>) -> Result<Self> {
        let versions = workload::guest_versions(outcome)?;
        Ok(Self { rows, versions, retries: outcome.retries, failures: Vec::new() })
    }
}

/// RAM of a guest that needs little memory, in MiB.
pub(crate) const LITTLE_RAM_MIB: u32 = 512;

/// Runs a guest with a time limit of three times its estimate plus a minute. Fails if the guest's job fails.
pub(crate) fn run(guest: Guest, estimate: Duration, site: &Site) -> Result<Outcome> {
    let outcome = guest.time_limit(estimate * 3 + Duration::from_secs(60)).run(site)?;
    ensure!(outcome.job_status == 0, "the job ended with status {}; console:\n{}", outcome.job_status, outcome.console);
    Ok(outcome)
}

/// Converts a time to ms.
pub(crate) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Returns the time from the VMM's start to the guest's first program, in ms.
pub(crate) fn start_ms(outcome: &Outcome) -> Result<f64> {
    outcome.begun.map(ms).context("the console does not show the start of the guest's first program")
}

/// Returns a key's value as text, without quotes.
pub(crate) fn word(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Converts a count or a number of bytes to a figure.
#[expect(clippy::cast_precision_loss, reason = "figures are far below 2^52")]
pub(crate) fn figure(count: u64) -> f64 {
    count as f64
}

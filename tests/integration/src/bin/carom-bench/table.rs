// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What a table is: the work that fills it, the rows that come of that, and how it is shown.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use carom_integration::{Guest, Outcome, Site, workload};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// How much is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// The fewest cells.
    Quick,
    /// A choice for an hour.
    Plain,
    /// All.
    All,
}

impl Scope {
    /// Its name in results.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Quick => "quick",
            Self::Plain => "plain",
            Self::All => "all-cells",
        }
    }
}

/// A table.
pub(crate) struct Table {
    /// Its name.
    pub(crate) name: &'static str,
    /// The key whose values are the columns of what is shown; the other keys make the rows.
    pub(crate) across: &'static str,
    /// The figures that are shown, each in a table of its own.
    pub(crate) shown: &'static [Shown],
    /// A plain run fills it once unless it is told how often: it takes long, or its figures move little.
    pub(crate) is_once_enough: bool,
    /// The work of one round.
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

    /// The same, which a plain run fills once.
    pub(crate) const fn once(mut self) -> Self {
        self.is_once_enough = true;
        self
    }
}

/// How a figure is shown.
pub(crate) struct Shown {
    /// Its key in rows.
    pub(crate) figure: &'static str,
    /// What it is, with its unit.
    pub(crate) title: &'static str,
    /// Places behind the point.
    pub(crate) places: usize,
}

impl Shown {
    pub(crate) const fn new(figure: &'static str, title: &'static str, places: usize) -> Self {
        Self { figure, title, places }
    }
}

/// One row as it was measured once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    /// What the figures are of.
    pub(crate) of: Vec<(String, Value)>,
    /// The figures by their keys.
    pub(crate) figures: BTreeMap<String, f64>,
}

impl Row {
    pub(crate) fn new<const N: usize, const M: usize>(of: [(&str, Value); N], figures: [(&str, f64); M]) -> Self {
        Self {
            of: of.into_iter().map(|(key, value)| (key.into(), value)).collect(),
            figures: figures.into_iter().map(|(key, figure)| (key.into(), figure)).collect(),
        }
    }

    /// The value of a key.
    pub(crate) fn key(&self, key: &str) -> Option<&Value> {
        self.of.iter().find(|(known, _)| known == key).map(|(_, value)| value)
    }
}

/// Part of a table that is measured at a time: a guest for the most part.
pub(crate) struct Work {
    /// What tells it from the others of its table.
    pub(crate) name: String,
    /// How long it takes, roughly.
    pub(crate) estimate: Duration,
    /// Does it.
    pub(crate) run: Measure,
}

/// Measures at a site, under a name that no other guest of the run has.
pub(crate) type Measure = Box<dyn Fn(&Site, &str) -> Result<Measured>>;

/// What came of it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Measured {
    /// The rows.
    pub(crate) rows: Vec<Row>,
    /// What went wrong though the rest did not, a line each.
    pub(crate) failures: Vec<String>,
    /// Versions of what runs in the guest.
    pub(crate) versions: BTreeMap<String, String>,
    /// How often a guest was started again.
    pub(crate) retries: u32,
}

impl Measured {
    /// These rows of a guest.
    pub(crate) fn of(outcome: &Outcome, rows: Vec<Row>) -> Result<Self> {
        let versions = workload::guest_versions(outcome)?;
        Ok(Self { rows, versions, retries: outcome.retries, failures: Vec::new() })
    }
}

/// RAM in MiB of a guest that needs little.
pub(crate) const LITTLE_RAM_MIB: u32 = 512;

/// Runs a guest that is ended when it takes three times as long as it should, and a minute more; its job must end well.
pub(crate) fn run(guest: Guest, estimate: Duration, site: &Site) -> Result<Outcome> {
    let outcome = guest.time_limit(estimate * 3 + Duration::from_secs(60)).run(site)?;
    ensure!(outcome.job_status == 0, "the job ended with status {}; console:\n{}", outcome.job_status, outcome.console);
    Ok(outcome)
}

/// A time in ms.
pub(crate) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// From the VMM's start to the guest's first program, in ms.
pub(crate) fn start_ms(outcome: &Outcome) -> Result<f64> {
    outcome.begun.map(ms).context("the guest's first program was not seen to begin")
}

/// A key's value as it is shown: text without its quotes.
pub(crate) fn word(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// A count, or a number of bytes, as a figure.
#[expect(clippy::cast_precision_loss, reason = "figures are far below 2^52")]
pub(crate) fn figure(count: u64) -> f64 {
    count as f64
}

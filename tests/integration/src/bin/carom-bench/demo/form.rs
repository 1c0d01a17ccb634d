// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What the forms of the demo have in common: each runs guests of some configurations, reads figures from what they print,
//! and shows them in tables.

use std::time::Duration;

use anyhow::Result;
use carom_integration::measure::machine::Machine;
use carom_integration::measure::mode::Mode;
use carom_integration::{Outcome, Site};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::demo::config::Config;
use crate::demo::plan::Step;

/// A form of the demo, as the figures that it has of one guest.
pub(crate) trait Form: Clone + Serialize + DeserializeOwned {
    /// Figures of one configuration.
    type Summary;

    /// How long a guest takes, roughly.
    const ESTIMATE: Duration;
    /// How long a guest may take.
    const TIME_LIMIT: Duration;
    /// Whether some configurations are also measured with two jobs.
    const TWO_JOBS: bool = false;
    /// Whether guests get a CPU for themselves ([`carom_integration::Guest::vcpus_apart`]).
    const VCPUS_APART: bool = false;
    /// What fio does, for the report.
    const FIO: &'static str;

    /// Whether the configuration is measured unless others are asked for.
    fn is_usual(mode: &Mode, site: &Site) -> bool;

    /// The guest's job, once its drive is there.
    fn job(step: &Step, quick: bool) -> String;

    /// Reads what the job printed.
    ///
    /// # Errors
    /// A figure is missing, or the guest did not do what its configuration says.
    fn read(step: &Step, outcome: &Outcome) -> Result<Self>;

    /// Puts the figures of a configuration's guests together, which have one job each, or two. `None` where some are missing
    /// that there must be.
    fn summary(one_job: &[&Self], two_jobs: &[&Self]) -> Option<Self::Summary>;

    /// The report's tables, and an empty line or more lines behind them.
    fn tables(configs: &[Config<Self::Summary>], machine: &Machine) -> String;
}
